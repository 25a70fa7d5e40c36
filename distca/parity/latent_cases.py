"""Cases of multi-head latent attention, which are held against unmodified Megatron-Core on one document at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from distca.parity.cases import LENGTHS, ParityCase, ParityShape
from distca.parity.experts import expert_case


def _sizes(q_rank: int, kv_rank: int, key_dim: int, rotary_dim: int, value_dim: int) -> dict[str, Any]:
    ranks = {"q_lora_rank": q_rank, "kv_lora_rank": kv_rank}
    widths = {"qk_head_dim": key_dim, "qk_pos_emb_head_dim": rotary_dim, "v_head_dim": value_dim}
    return {"multi_latent_attention": True, **ranks, **widths}


_SIZES, _ALIKE = _sizes(12, 20, 8, 4, 6), _sizes(12, 20, 6, 2, 8)
_GPU_SIZES, _GPU_ALIKE = _sizes(192, 256, 128, 64, 128), _sizes(192, 256, 64, 64, 128)
_WHOLE = {"q_lora_rank": None}
_ROPE = {"rope_type": "rope", "rotary_base": 100.0}
_YARN = {"rope_type": "yarn", "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 16}
_YARN |= {"mscale": 0.7, "mscale_all_dim": 1.0}
_NORMS = {"qk_layernorm": True}
_DEEPSEEK = {
    "moe_shared_expert_intermediate_size": 16,
    "moe_layer_freq": [0, 1],
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.5,
}


def latent_cases(tp: int = 1, lengths: tuple[tuple[int, ...], ...] = LENGTHS, pp: int = 1) -> list[ParityCase]:
    """Low-rank queries and whole ones, norms of latent rows and none, RoPE and YaRN, in all modes; keys and values of
    DeepSeek's widths where documents are those of GPUs."""
    sizes, alike = (_SIZES, _ALIKE) if lengths is LENGTHS else (_GPU_SIZES, _GPU_ALIKE)
    cases: list[dict[str, Any]] = [
        {"config": {**_ROPE, **_NORMS}},
        {"config": {**_WHOLE, **_YARN}, "backward": "resend", "recompute": "all"},
        {"config": {**_YARN, **_NORMS}, "backward": "resend", "recompute": "mlp", "ping_pong": False},
        {"config": {**alike, **_WHOLE, **_ROPE}, "recompute": "all", "scheduler": "random"},
        {"config": {**_YARN}, "backward": "resend", "recompute": "all", "offload": True},
        {"config": {**_WHOLE, **_ROPE, **_NORMS}, "recompute": "all"},
    ]
    if pp > 1:
        cases = [{**case, "backward": "resend", "offload": False, "scheduler": "real"} for case in cases]
    for case in cases:
        case["config"] = {**sizes, **case["config"]}
    return [ParityCase(micro_batches=lengths, shape=ParityShape(kv_heads=4), tp=tp, pp=pp, **case) for case in cases]


def latent_expert_cases(tp: int = 1, pp: int = 1, ep: int = 1) -> list[ParityCase]:
    """DeepSeek's layers: experts chosen by sigmoid, bias and groups, a shared one, a dense first layer, and a loss for
    each document; with low-rank queries, and as Moonlight without."""
    found = []
    for number, attention in enumerate(({**_YARN, **_NORMS}, {**_WHOLE, **_ROPE, **_NORMS})):
        case = expert_case(
            "sigmoid, bias, groups, scaling",
            shape=ParityShape(kv_heads=4),
            tp=tp,
            pp=pp,
            ep=ep,
            backward="resend" if pp > 1 or number else "keep",
            recompute=("mlp", "all")[number],
        )
        found.append(replace(case, config={**case.config, **_DEEPSEEK, **_SIZES, **attention}))
    return found
