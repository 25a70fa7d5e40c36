"""Hybrid stacks: unmodified Megatron-Core's layers with gated delta nets on a CPU, and cases that compare with them.

Megatron-Core runs its gated delta net by fla's kernels, or in deterministic mode by torch, one document at a time. It
asks for fla's norm in either case, for which torch stands in here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from distca.parity.cases import ParityCase, ParityShape
from megatron_patches.model.recurrences import is_recurrent


def hybrid_cases() -> list[ParityCase]:
    """Stacks of recurrent layers and attention in several orders, with gates on attention's output and without."""
    net = {
        "experimental_attention_variant": "gated_delta_net",
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    gate = {"attention_output_gate": True, "qk_layernorm": True}
    last = {**net, **gate, "linear_attention_freq": 3, "layernorm_zero_centered_gamma": False}
    kinds = {"window_size": (6, 0), "window_attn_skip_freq": [1, 0, 0], "softmax_type": "learnable"}
    between = {**net, **kinds, "linear_attention_freq": [0, 1, 0], "linear_conv_kernel_dim": 2}
    return [
        ParityCase(micro_batches=_LENGTHS, tp=2, recompute="mlp", config=last, rotary_percent=0.5, shape=_SHAPE),
        ParityCase(micro_batches=_LENGTHS[::-1], recompute="all", backward="resend", config=between, shape=_SHAPE),
        ParityCase(micro_batches=((2,), (1,)), ping_pong=False, config=between, shape=_SHAPE),  # ranks without tokens
        ParityCase(micro_batches=_LENGTHS, tp=2, ping_pong=False, config=gate),
    ]


_SHAPE = ParityShape(layers=3)
_LENGTHS = ((13, 1, 29), (25,))


def unmodified_layers(layer: ModuleSpec, config: TransformerConfig) -> list[ModuleSpec]:
    """Megatron's specs of all layers, of which ``layer`` is that of those with attention."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common

    common.HAVE_FLA, common.l2norm = True, _unit_heads
    recurrent = deepcopy(layer)
    recurrent.submodules.self_attention = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
        ),
    )
    return [recurrent if is_recurrent(config, number) else layer for number in range(1, config.num_layers + 1)]


def by_torch(config: TransformerConfig) -> TransformerConfig:
    """The configuration with which Megatron's gated delta net asks for no kernel of fla."""
    return replace(config, deterministic_mode=True)


def _unit_heads(heads: torch.Tensor, dim: int = -1, eps: float = 1e-6) -> torch.Tensor:
    return heads * torch.rsqrt(heads.square().sum(dim, keepdim=True) + eps)


@contextmanager
def float32_casts_lifted() -> Iterator[None]:
    """Let float64 tensors stay what they are where Megatron casts to float32, also when it computes again."""
    float_, to = torch.Tensor.float, torch.Tensor.to

    def lifted_float(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if self.dtype == torch.float64 else float_(self, *args, **kwargs)

    def lifted_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        casts = torch.float32 in (*args, *kwargs.values())
        return self if casts and self.dtype == torch.float64 else to(self, *args, **kwargs)

    with patch.object(torch.Tensor, "float", lifted_float), patch.object(torch.Tensor, "to", lifted_to):
        yield
