"""Transformer Engine's linear layers, as Megatron wraps them, in layers that run once per nano-batch.

Importing this module imports Transformer Engine.
"""

from __future__ import annotations

import logging
from functools import cached_property
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

from megatron_patches.te.fp8_weights import break_reference_cycle, forget_columns, is_fp8, keep_rows_only
from megatron_patches.te.quantization import in_fp8, make_recipe

logger = logging.getLogger(__name__)

_HISTORY = {"forward": "scaling_fwd", "backward": "scaling_bwd"}


class _Linear:
    """The common part of both linear layers."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._is_fp8 = is_fp8(self.weight)  # type: ignore[attr-defined]
        if self._is_fp8:
            keep_rows_only(self.weight)  # type: ignore[attr-defined]
            break_reference_cycle(self.weight)  # type: ignore[attr-defined]

    def _apply(self, function: Any, recurse: bool = True) -> Any:
        """Leaves FP8 weights as they are: they are on their GPU, and a conversion would quantise them once more."""
        return self if self._is_fp8 else super()._apply(function, recurse)  # type: ignore[misc]

    @property
    def is_first_microbatch(self) -> bool:
        """It is always False. Else the product of a step's first rows would overwrite the weight's gradient. But in
        backward ping, which is first in forward, comes after pong."""
        return False

    @is_first_microbatch.setter
    def is_first_microbatch(self, first: bool) -> None:
        """Notes that weights have changed and must be quantised anew; Megatron sets it before a step's first
        forward."""
        if first:
            self.__dict__.get("_fp8_workspaces", {}).clear()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the output, and the bias where the caller adds it."""
        with in_fp8(self._recipe, self.config):  # type: ignore[attr-defined]
            output: tuple[torch.Tensor, torch.Tensor | None] = super().forward(x)  # type: ignore[misc]
        if self._is_fp8 and (product := output[0].grad_fn) is not None:
            product.register_hook(self._after_backward)
        return output

    def _after_backward(self, *_: Any) -> None:
        forget_columns(self.weight)  # type: ignore[attr-defined]

    @cached_property
    def _recipe(self) -> Any:
        return make_recipe(self.config)  # type: ignore[attr-defined]

    # Checkpoints hold tensors only. Transformer Engine's own state is a pickle, and loading it would run code.

    def get_extra_state(self) -> dict[str, torch.Tensor] | None:
        """Returns scales and largest values of delayed scaling; None where there are none."""
        meta = self.fp8_meta  # type: ignore[attr-defined]
        if self._recipe is None or not self._recipe.delayed() or "scaling_fwd" not in meta:
            return None
        return {
            f"{part}_{name}": getattr(meta[key], name).detach().cpu()
            for part, key in _HISTORY.items()
            for name in ("scale", "amax_history")
        }

    def set_extra_state(self, state: Any) -> None:
        """Sets the state that :meth:`get_extra_state` returned; the state of other kinds of layers is not read."""
        if self._recipe is None or not self._recipe.delayed() or not isinstance(state, dict):
            return
        meta = self.fp8_meta  # type: ignore[attr-defined]
        meta["recipe"], meta["num_gemms"] = self._recipe, 1
        self.init_fp8_meta_tensors(self._recipe)  # type: ignore[attr-defined]
        pairs = [
            (getattr(meta[key], name), state[f"{part}_{name}"])
            for part, key in _HISTORY.items()
            for name in ("scale", "amax_history")
        ]
        if any(held.shape != loaded.shape for held, loaded in pairs):
            logger.warning(
                "Scales and their history begin anew: the history has another length than in the checkpoint."
            )
            return
        for held, loaded in pairs:
            held.copy_(loaded)


class ColumnLinear(_Linear, TEColumnParallelLinear):  # type: ignore[misc]
    """A linear layer that is split over tensor-parallel ranks by outputs: linear_qkv and linear_fc1."""


class RowLinear(_Linear, TERowParallelLinear):  # type: ignore[misc]
    """A linear layer that is split over tensor-parallel ranks by inputs: linear_proj and linear_fc2."""
