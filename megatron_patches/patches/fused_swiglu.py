"""megatron's gated MLP with a fused SwiGLU that keeps half as much for backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP

from distca.ops.discard_output import forget_until_backward
from distca.ops.swiglu import fill_swiglu, swiglu


class SwigluMLP(MLP):
    """megatron's MLP; what its first layer puts out is kept for backward, and SwiGLU is computed from it again.
    megatron warns of classes that it does not know when it builds one, so :func:`fuse_swiglu` turns built ones into it.
    """

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """[rows, 1, hidden] of the normalised rows, and no bias."""
        assert per_token_scale is None  # of mixtures of experts
        gate_and_up, _ = self.linear_fc1(hidden_states)
        activated = swiglu(gate_and_up)
        output, _ = self.linear_fc2(activated)
        forget_until_backward(activated, partial(fill_swiglu, gate_and_up.detach()), output)
        return output, None


def fuse_swiglu(model: torch.nn.Module) -> None:
    """Let every MLP whose activation is a plain SwiGLU compute it in one pass; all others stay megatron's."""
    for module in model.modules():
        if type(module) is MLP and _is_swiglu(module.config):
            module.__class__ = SwigluMLP


def _is_swiglu(config: TransformerConfig) -> bool:
    return (
        config.gated_linear_unit
        and config.activation_func is torch.nn.functional.silu
        and not config.add_bias_linear
        and not config.activation_func_fp8_input_store
        and config.activation_func_clamp_value is None
        and not config.glu_linear_offset
    )
