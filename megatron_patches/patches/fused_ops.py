"""Gives Megatron-Core's own modules fused operations of this project.

- Attention: the split of the QKV projection and RoPE in one pass, in place of Transformer Engine's function.
- MLPs: SwiGLU in one pass, and less memory for other activations.
- Weight gradients: a matrix product adds them to ``main_grad``, in place of Apex's CUDA extension.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig, attention
from megatron.core.transformer.mlp import MLP

from distca.ops.gate import SWIGLU, Gate
from distca.ops.output_loss import add_product
from distca.ops.recomputed import forget_until_backward, recomputed
from distca.ops.rotary import Rotation, split_and_rotate
from distca.ops.swiglu import fill_swiglu, swiglu
from megatron_patches.model.expert_fields import sigmoid_gelu
from megatron_patches.te.quantization import keeps_inputs

_KEPT = "distca_rotation"
_SLOPES = {torch.nn.functional.silu: 1.0, sigmoid_gelu: 1.702, quick_gelu: 1.702}
"""The slope of activation functions x · sigmoid(slope · x)."""


def fuse_rotation(config: TransformerConfig) -> None:
    """Makes Megatron's layers built with ``config`` split the QKV projection's output and rotate q and k in one pass.

    This function does nothing for models with ``qk_layernorm``, ``no_rope_freq`` or ``rotary_interleaved``.
    """
    if config.qk_layernorm or config.no_rope_freq or config.rotary_interleaved:
        return
    attention.apply_fused_qkv_rotary_pos_emb = _split_and_rotate
    attention.HAVE_FUSED_QKV_ROPE = True
    config.fused_single_qkv_rope = True


def _split_and_rotate(
    mixed: torch.Tensor, angles: torch.Tensor, _: torch.Tensor, sizes: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns q, k and v of one layer, split and rotated; takes the place of Transformer Engine's function.

    Args:
        mixed: [rows, 1, groups, (heads / groups + 2) x head_dim], the output of the QKV projection. A group is a key
            head with its query heads.
        angles: [rows, 1, 1, dims] RoPE's angles of a head's first ``dims`` elements. Megatron passes this tensor twice,
            for queries and for keys.
        sizes: number of elements of q, k and v in a group.

    Returns:
        [rows, 1, heads, head_dim] q, and [rows, 1, groups, head_dim] k and v.
    """
    # All layers share the tensor of angles, so an attribute of the tensor keeps the cosines and sines.
    rotation = getattr(angles, _KEPT, None)
    if rotation is None:
        rotation = Rotation.of(angles, sizes[-1])
        setattr(angles, _KEPT, rotation)
    assert sum(sizes) == mixed.shape[3]
    # Axes: N rows, H query heads, G key heads, D elements of a head, 2 for k and v.
    q_NHD, kv_N2GD = split_and_rotate(mixed.flatten(1), rotation, mixed.shape[2])
    k_NGD, v_NGD = kv_N2GD.unbind(1)
    return q_NHD[:, None], k_NGD[:, None], v_NGD[:, None]


class SwigluMLP(MLP):
    """Megatron's MLP with SwiGLU in one pass.

    Attributes:
        keeps_output: whether SwiGLU's output is kept for backward; if False, backward computes it again. This has no
            effect if the linear layer behind SwiGLU keeps an FP8 copy of the output for its own backward.
    """

    keeps_output = False

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns [rows, 1, hidden] the MLP's output without the last bias, and that bias or None."""
        assert per_token_scale is None  # Megatron passes a scale to experts only, which are not of this class
        gate_and_up, bias = self.linear_fc1(hidden_states)
        if bias is not None:
            gate_and_up = gate_and_up + bias
        activated = self._activated(gate_and_up)
        output, output_bias = self.linear_fc2(activated)
        if keeps_inputs(self.linear_fc2) and not self.keeps_output:
            forget_until_backward(activated, partial(self._fill, gate_and_up.detach()), output)
        return output, output_bias

    @staticmethod
    def _activated(gate_and_up: torch.Tensor) -> torch.Tensor:
        return swiglu(gate_and_up)

    @staticmethod
    def _fill(gate_and_up: torch.Tensor, out: torch.Tensor) -> None:
        fill_swiglu(gate_and_up, out)


class LeanMLP(SwigluMLP):
    """Megatron's MLP with another activation than SwiGLU. Backward computes the activation again."""

    def _activated(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return recomputed(self._function, x)

    def _fill(self, x: torch.Tensor, out: torch.Tensor) -> None:  # type: ignore[override]
        out.copy_(self._function(x))

    def _function(self, x: torch.Tensor) -> torch.Tensor:
        config = self.config
        if not config.gated_linear_unit:
            return config.activation_func(x)
        gate, up = x.chunk(2, dim=-1)
        if (most := config.activation_func_clamp_value) is not None:
            gate, up = gate.clamp(max=most), up.clamp(-most, most)
        return config.activation_func(gate) * (up + config.glu_linear_offset if config.glu_linear_offset else up)


def fuse_swiglu(model: torch.nn.Module) -> None:
    """Turns a built model's MLPs into :class:`SwigluMLP` or, with another activation, into :class:`LeanMLP`.

    Experts stay unchanged, and so do MLPs without SwiGLU if the configuration has ``bias_activation_fusion``.
    """
    for module in model.modules():
        if type(module) is not MLP or getattr(module.linear_fc1, "is_expert", False):
            continue
        config: TransformerConfig = module.config
        if is_swiglu(config):
            module.__class__ = SwigluMLP
        elif not config.bias_activation_fusion:
            module.__class__ = LeanMLP


def is_swiglu(config: TransformerConfig) -> bool:
    return gate_of(config) == SWIGLU


def gate_of(config: TransformerConfig) -> Gate | None:
    """Returns slope, offset and limit of an MLP's gated activation; None if no fused operation computes it.

    The activation is gate · sigmoid(slope · gate) · (up + offset), with gate and up clamped if there is a limit.
    """
    slope, limit = _SLOPES.get(config.activation_func), config.activation_func_clamp_value
    if config.bias_activation_fusion and config.activation_func is torch.nn.functional.silu:
        limit = None  # Megatron's fused SwiGLU ignores the limit, in dense layers and in experts
    plain = config.gated_linear_unit and not config.activation_func_fp8_input_store
    if slope is None or not plain or (limit is not None and limit <= 0):
        return None
    return Gate(slope, config.glu_linear_offset, limit or 0.0)


class _Products:
    @staticmethod
    def wgrad_gemm_accum_fp32(rows: torch.Tensor, d_out: torch.Tensor, main_grad: torch.Tensor) -> None:
        """Adds d_outᵀ @ rows to main_grad, for rows [N, in], d_out [N, out] and main_grad [out, in]."""
        add_product(main_grad, d_out.t(), rows)

    # Megatron calls this name if main_grad has 16 bits.
    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


def accumulate_weight_gradients_in_products() -> None:
    """Makes Megatron's ``gradient_accumulation_fusion`` work without Apex, in models that are built afterwards."""
    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = _Products
        layers._grad_accum_fusion_available = True
