"""Stacks of recurrent layers and attention that are held against unmodified Megatron-Core."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from distca.parity.cases import ParityCase, ParityShape

_SHAPE = ParityShape(layers=3)
_LENGTHS = ((13, 1, 29), (25,))
_WHOLE = (9, 1, 7, 2, 8, 3, 5, 4)
"""Documents that stay whole on four ranks, but for one."""


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
    small = partial(ParityCase, scheduler="random", shape=_SHAPE)
    return [
        small(micro_batches=_LENGTHS, tp=2, recompute="mlp", config=last, rotary_percent=0.5),
        small(micro_batches=_LENGTHS[::-1], recompute="all", backward="resend", config=between),
        small(micro_batches=((2,), (1,)), ping_pong=False, config=between),  # ranks without tokens
        ParityCase(micro_batches=_LENGTHS, tp=2, ping_pong=False, config=gate),
    ]


def hybrid_model_cases() -> list[ParityCase]:
    """Stacks of HybridModel: Qwen3.5's order, several MLPs in a row or none, and one before the first mixer."""
    net = {
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    gate = {"attention_output_gate": True, "qk_layernorm": True}
    mamba = {"mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_state_dim": 6}
    experts: dict[str, Any] = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
    experts |= {
        "moe_aux_loss_coeff": 0.0,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
    }
    odd = ParityShape(layers=7)
    small = partial(ParityCase, scheduler="random", shape=ParityShape(layers=4))
    return [
        small(micro_batches=_LENGTHS, tp=2, config=net | gate, rotary_percent=0.5, pattern="G-*-"),
        small(micro_batches=_LENGTHS[::-1], recompute="all", config=net, shape=odd, pattern="-G*--G-"),
        small(micro_batches=((2,), (1,)), ping_pong=False, config=net, pattern="*G-G"),
        small(micro_batches=_LENGTHS, tp=2, recompute="mlp", config=mamba, pattern="MM*-"),
        small(micro_batches=(*_LENGTHS, _WHOLE), config=mamba | experts, pattern="ME*E"),
        small(micro_batches=_LENGTHS, tp=2, pattern="*-*-"),
    ]


def hybrid_stage_cases() -> list[ParityCase]:
    """Stacks over two pipeline stages, which are idle at the beginning and at the end of a step: of HybridModel, and of
    GPTModel. Nothing of the last micro-batch moves, so exchanges are left out in phases that it has for itself."""
    first, _, second, mamba, *_ = hybrid_model_cases()
    last, *_, gate = hybrid_cases()
    stages: dict[str, Any] = {"pp": 2, "scheduler": "real", "micro_batches": (*_LENGTHS, (1,))}
    long, short = stages | {"shape": ParityShape(layers=8)}, stages | {"shape": ParityShape(layers=4)}
    return [
        replace(first, **long, pattern="G-*-|G-*-"),
        replace(second, **long, tp=1, recompute="all", pattern="*G-G|*G-G", ping_pong=True, deal=False),
        replace(mamba, **long, tp=1, pattern="MM*-|MM*-", recompute="mlp"),
        replace(last, **short, config={**last.config, "linear_attention_freq": 2}),
        replace(gate, **short),
    ]
