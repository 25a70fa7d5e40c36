"""Hybrid stacks of unmodified Megatron-Core on a CPU: layers with gated delta nets or Mamba-2, and HybridModel.

Megatron-Core runs its gated delta net by fla's kernels, or in deterministic mode by torch, one document at a time. It
asks for fla's norm in either case, for which torch stands in here.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch.nn import functional

from distca.parity.cases import ParityCase
from distca.recurrent import CoreParameters
from distca.testing.reference_recurrence import recurrent_core
from megatron_patches.model.gpt import build_hybrid
from megatron_patches.model.pattern import layers_of
from megatron_patches.model.recurrences import is_recurrent


def unmodified_layers(layer: ModuleSpec, config: TransformerConfig) -> list[ModuleSpec]:
    """Megatron's specs of all layers, of which ``layer`` is that of those with attention."""
    recurrent = _delta_net_layer(layer)
    return [recurrent if is_recurrent(config, number) else layer for number in range(1, config.num_layers + 1)]


def _delta_net_layer(layer: ModuleSpec) -> ModuleSpec:
    """Megatron's spec of a layer with a gated delta net, from that of one with attention."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common

    common.HAVE_FLA, common.l2norm = True, _unit_heads
    recurrent = deepcopy(layer)
    recurrent.submodules.self_attention = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
        ),
    )
    return recurrent


def unmodified_hybrid_model(case: ParityCase, config: TransformerConfig) -> Any:
    """Megatron's own HybridModel on a CPU: a stack of Megatron's layers, but for its final norm, which asks for
    Transformer Engine."""
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.transformer_layer import MoETransformerLayer

    class Stack(HybridStack):
        """Has torch's norm behind its layers."""

        def __init__(self, config: TransformerConfig, *arguments: Any, **named: Any) -> None:
            super().__init__(config, *arguments, **named, post_layer_norm=False)
            self.final_norm = WrappedTorchNorm(config, config.hidden_size, config.layernorm_epsilon)

        def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
            hidden: torch.Tensor = self.final_norm(super().forward(*arguments, **named))
            return hidden

    layer = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    attention, mlp = deepcopy(layer), deepcopy(layer)
    attention.submodules.pre_mlp_layernorm = attention.submodules.mlp = IdentityOp
    attention.submodules.mlp_bda = IdentityFuncOp
    mlp.module = MLPLayer
    mlp.submodules.input_layernorm = mlp.submodules.self_attention = IdentityOp
    mlp.submodules.self_attn_bda = IdentityFuncOp
    mixer = ModuleSpec(
        module=_written_mixer(),
        submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
    )
    mamba = MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=mixer, mamba_bda=get_bias_dropout_add)
    parts = {"mamba_layer": ModuleSpec(module=MambaLayer, submodules=mamba)}
    parts |= {"attention_layer": attention, "mlp_layer": mlp, "gdn_layer": _delta_net_layer(attention)}
    if config.num_moe_experts:
        experts = get_gpt_layer_local_spec(
            normalization=config.normalization, num_experts=config.num_moe_experts, moe_grouped_gemm=False
        )
        experts.module = MoETransformerLayer
        experts.submodules.input_layernorm = experts.submodules.self_attention = IdentityOp
        experts.submodules.self_attn_bda = IdentityFuncOp
        parts["moe_layer"] = experts
    spec = ModuleSpec(module=Stack, submodules=HybridStackSubmodules(**parts))
    percent = case.rotary_percent
    pattern = layers_of(case.pattern)  # on one rank, whatever stages there are elsewhere
    return build_hybrid(case.shape.vocabulary, by_torch(config), spec, pattern, rotary_percent=percent)


def _written_mixer() -> type:
    """Megatron's Mamba-2 mixer, whose kernels ask for a GPU, with the formula written out, one row after the other."""
    from megatron_patches.layers.mamba import OwnMambaMixer
    from megatron_patches.model.recurrences import mamba_recurrence

    class Mixer(OwnMambaMixer):
        """Takes one document."""

        def forward(self, hidden: torch.Tensor, **_: Any) -> Any:  # type: ignore[override]
            what = mamba_recurrence(self.config)
            projected = self.in_proj(hidden)[0].squeeze(1)
            gate, mixed, steps = projected.split((what.heads * what.value_dim, what.channels, what.heads), 1)
            beta = functional.softplus(steps + self.dt_bias)
            parameters = CoreParameters(self.conv1d_weight.squeeze(1), self.conv1d_bias, self.D)
            o = recurrent_core(mixed, -self.A_log.exp() * beta, beta, parameters, [len(mixed)], what)
            gated = (o.flatten(1) * gate * gate.sigmoid()).unflatten(1, (what.key_heads, -1))
            normed = gated / (gated.square().mean(2, keepdim=True) + self.norm.eps).sqrt()
            return self.out_proj((normed.flatten(1) * self.norm.weight).unsqueeze(1))

    return Mixer


def by_torch(config: TransformerConfig) -> TransformerConfig:
    """The configuration with which Megatron's gated delta net asks for no kernel of fla."""
    return replace(config, deterministic_mode=True)


def _unit_heads(heads: torch.Tensor, dim: int = -1, eps: float = 1e-6) -> torch.Tensor:
    return heads * torch.rsqrt(heads.square().sum(dim, keepdim=True) + eps)
