"""Makes the fields of Megatron's TransformerConfig for layers with experts."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state

from distca.models.shape import ModelShape


def expert_fields(shape: ModelShape) -> dict[str, Any]:
    """Returns the names and values of the fields; empty for a model without experts."""
    experts = shape.experts
    if not experts.count:
        return {}
    losses = {"aux_loss": experts.balance, "seq_aux_loss": experts.document_balance}
    kinds = [kind for kind, coefficient in losses.items() if coefficient]
    return {
        "num_moe_experts": experts.count,
        "moe_layer_freq": [int(number >= experts.dense_layers) for number in range(shape.layers)],
        "moe_ffn_hidden_size": experts.ffn,
        "moe_shared_expert_intermediate_size": experts.shared_ffn or None,
        "moe_shared_expert_gate": experts.shared_gate,
        "moe_router_topk": experts.topk,
        "moe_router_pre_softmax": not experts.normalize,
        "moe_router_score_function": experts.score,
        "moe_router_enable_expert_bias": experts.bias,
        "moe_router_bias_update_rate": experts.bias_rate,
        "moe_router_num_groups": experts.groups or None,
        "moe_router_group_topk": experts.chosen_groups or None,
        "moe_router_topk_scaling_factor": None if experts.scale == 1 else experts.scale,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": kinds or "none",
        "moe_aux_loss_coeff": [losses[kind] for kind in kinds] or 0.0,
        "moe_z_loss_coeff": experts.z_loss or None,
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": 1,
        "add_bias_linear": experts.biases,
    } | (_clamped(experts.clamp) if experts.clamp else {})


def _clamped(limit: float) -> dict[str, Any]:
    """Returns the fields of gpt-oss's activation, which adds biases before it clamps at ``limit``."""
    # Megatron's fused activation adds biases after clamping, so it is not used.
    return {
        "activation_func": sigmoid_gelu,
        "activation_func_clamp_value": limit,
        "glu_linear_offset": 1.0,
        "bias_activation_fusion": False,
    }


def sigmoid_gelu(gate: torch.Tensor) -> torch.Tensor:
    """Returns gate · sigmoid(1.702 · gate), an approximation of GELU (Hendrycks & Gimpel 2016)."""
    return gate * torch.sigmoid(1.702 * gate)
