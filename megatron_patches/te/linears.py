"""Megatron's wrappers of Transformer Engine's linear layers, changed for ping-pong, FP8 and safe checkpoints.

With ping-pong a layer runs forward of ping, then of pong. Later it runs backward of pong, then of ping.
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
"""The names under which Transformer Engine holds the state of delayed scaling: scales, and the largest values of
earlier steps, from which scales are computed."""


class _Linear:
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._is_fp8 = is_fp8(self.weight)  # type: ignore[attr-defined]
        if self._is_fp8:
            keep_rows_only(self.weight)  # type: ignore[attr-defined]
            break_reference_cycle(self.weight)  # type: ignore[attr-defined]

    def _apply(self, function: Any, recurse: bool = True) -> Any:
        """Ignores ``.cuda()``, ``.bfloat16()`` and the like for an FP8 weight, which they would round again."""
        return self if self._is_fp8 else super()._apply(function, recurse)  # type: ignore[misc]

    @property
    def is_first_microbatch(self) -> bool:
        """Always False. With True, backward of ping would overwrite the weight's gradient from pong."""
        return False

    @is_first_microbatch.setter
    def is_first_microbatch(self, first: bool) -> None:
        if first:  # the optimizer has changed the weight since its FP8 copies were cached
            self.__dict__.get("_fp8_workspaces", {}).clear()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
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

    # Transformer Engine's extra state is a pickle, which can run code when it is loaded. Here it has only tensors.

    def get_extra_state(self) -> dict[str, torch.Tensor] | None:
        """Returns the state of delayed scaling; None without delayed scaling, and before the first forward."""
        meta = self.fp8_meta  # type: ignore[attr-defined]
        if self._recipe is None or not self._recipe.delayed() or "scaling_fwd" not in meta:
            return None
        return {
            f"{part}_{name}": getattr(meta[key], name).detach().cpu()
            for part, key in _HISTORY.items()
            for name in ("scale", "amax_history")
        }

    def set_extra_state(self, state: Any) -> None:
        """Sets the state that :meth:`get_extra_state` returned; does nothing without delayed scaling.

        If the state's history has another length than this run's, the state begins anew, with a warning.
        """
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
                "FP8 scales begin anew: the checkpoint's history of largest values has another length than this run's."
            )
            return
        for held, loaded in pairs:
            held.copy_(loaded)


class ColumnLinear(_Linear, TEColumnParallelLinear):  # type: ignore[misc]
    pass


class RowLinear(_Linear, TERowParallelLinear):  # type: ignore[misc]
    pass
