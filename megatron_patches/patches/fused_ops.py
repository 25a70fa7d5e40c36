"""Fused operations in Megatron-Core's own layers.

- The rotation of q and k with the split of their projection, where attention stays at home. Megatron's layers take it
  from Transformer Engine (``fused_single_qkv_rope``), which few have installed. Here they get the kernel of
  disaggregated layers, so that all modes rotate alike.
- SwiGLU in one pass.
- Weight gradients that the matrix product itself adds up, in float32 or bfloat16. With
  ``gradient_accumulation_fusion`` Megatron's linear layers call a CUDA extension of Apex for it. Here torch's own
  product stands in.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig, attention
from megatron.core.transformer.mlp import MLP

from distca.ops.discard_output import forget_until_backward
from distca.ops.gate import SWIGLU, Gate
from distca.ops.output_loss import add_product
from distca.ops.recomputed import recomputed
from distca.ops.rotary import Rotation, split_and_rotate
from distca.ops.swiglu import fill_swiglu, swiglu
from megatron_patches.model.expert_fields import sigmoid_gelu
from megatron_patches.te.quantization import keeps_inputs

_KEPT = "distca_rotation"
_SLOPES = {torch.nn.functional.silu: 1.0, sigmoid_gelu: 1.702, quick_gelu: 1.702}
"""The factor in the sigmoid of activation functions that a gate computes."""


def fuse_rotation(config: TransformerConfig) -> None:
    """Makes layers that are built with ``config`` split their QKV projection and rotate q and k in one pass.

    Three kinds of models keep Megatron's operations. Norms of query and key heads come between the split and the
    rotation; layers without RoPE have no angles; and interleaved pairs have no kernel."""
    if config.qk_layernorm or config.no_rope_freq or config.rotary_interleaved:
        return
    attention.apply_fused_qkv_rotary_pos_emb = _split_and_rotate
    attention.HAVE_FUSED_QKV_ROPE = True
    config.fused_single_qkv_rope = True


def _split_and_rotate(
    mixed: torch.Tensor, angles: torch.Tensor, _: torch.Tensor, sizes: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns q, k and v of one layer, split and rotated.

    Args:
        mixed: [rows, 1, groups, (heads / groups + 2) x head_dim].
        angles: [rows, 1, 1, head_dim], the same for q and for k.
        sizes: columns of q, k and v in a group.

    Returns:
        [rows, 1, heads, head_dim] q, and [rows, 1, groups, head_dim] k and v.
    """
    # All layers use the same cosines and sines, which are kept on the angles and live as long as these.
    rotation = getattr(angles, _KEPT, None)
    if rotation is None:
        rotation = Rotation.of(angles, sizes[-1])
        setattr(angles, _KEPT, rotation)
    assert sum(sizes) == mixed.shape[3]
    q_NHD, kv_N2GD = split_and_rotate(mixed.flatten(1), rotation, mixed.shape[2])
    k_NGD, v_NGD = kv_N2GD.unbind(1)  # backward of unbind stacks both gradients in one copy
    return q_NHD[:, None], k_NGD[:, None], v_NGD[:, None]


class SwigluMLP(MLP):
    """megatron's MLP with SwiGLU in one pass. The output of its first layer is kept for backward, and SwiGLU is
    computed from it again unless the MLP ``keeps_output``.

    megatron warns of unknown classes when it builds a model, so :func:`fuse_swiglu` turns built MLPs into this one.
    """

    keeps_output = False

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the MLP's output [rows, 1, hidden], and the last layer's bias, where it has one, to be added."""
        assert per_token_scale is None  # only experts have it, and these stay megatron's
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
    """megatron's MLP with any other activation, which is computed again in backward, without a kernel of its own."""

    def _activated(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return recomputed(self._function, x)

    def _fill(self, x: torch.Tensor, out: torch.Tensor) -> None:  # type: ignore[override]
        out.copy_(self._function(x))

    def _function(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the result of the operations that megatron's MLP has between its linear layers."""
        config = self.config
        if not config.gated_linear_unit:
            return config.activation_func(x)
        gate, up = x.chunk(2, dim=-1)
        if (most := config.activation_func_clamp_value) is not None:
            gate, up = gate.clamp(max=most), up.clamp(-most, most)
        return config.activation_func(gate) * (up + config.glu_linear_offset if config.glu_linear_offset else up)


def fuse_swiglu(model: torch.nn.Module) -> None:
    """Makes MLPs with a plain SwiGLU compute it in one pass, and other MLPs compute their activation again in backward.
    MLPs whose activation megatron fuses itself stay megatron's."""
    for module in model.modules():
        if type(module) is not MLP or getattr(module.linear_fc1, "is_expert", False):  # outputs of experts are scaled
            continue
        config: TransformerConfig = module.config
        if is_swiglu(config):
            module.__class__ = SwigluMLP
        elif not config.bias_activation_fusion:
            module.__class__ = LeanMLP


def is_swiglu(config: TransformerConfig) -> bool:
    """Whether an MLP's activation is SwiGLU and nothing else."""
    return gate_of(config) == SWIGLU


def gate_of(config: TransformerConfig) -> Gate | None:
    """The gate of an MLP's activation, where it is one that is computed in one pass."""
    slope, limit = _SLOPES.get(config.activation_func), config.activation_func_clamp_value
    plain = config.gated_linear_unit and not config.activation_func_fp8_input_store
    if slope is None or not plain or (limit is not None and limit <= 0):
        return None
    return Gate(slope, config.glu_linear_offset, limit or 0.0)


class _Products:
    """Stands in for the extension's module."""

    @staticmethod
    def wgrad_gemm_accum_fp32(rows: torch.Tensor, d_out: torch.Tensor, main_grad: torch.Tensor) -> None:
        """Does main_grad += d_outᵀ @ rows, with rows [N, in], d_out [N, out] and main_grad [out, in] float32."""
        add_product(main_grad, d_out.t(), rows)

    # With main_grad in the type of rows and d_out, the sum is rounded once.
    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


def accumulate_weight_gradients_in_products() -> None:
    """Makes ``gradient_accumulation_fusion`` work without Apex; it must be called before the model is built."""
    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = _Products
        layers._grad_accum_fusion_available = True
