"""Megatron-Core's experts, by Transformer Engine's grouped layers: their configuration and their weights."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
    model_parallel_cuda_manual_seed,
)

from distca.train.config.schema import RunConfig


def expert_fields(run: RunConfig, on_gpu: bool) -> dict[str, Any]:
    """The fields that say what a model's experts are; none in dense models. On GPUs the products are grouped and the
    permutation is fused, as NVIDIA's recipes set.

    Args:
        run: a validated configuration.
        on_gpu: whether the ranks have GPUs.
    """
    model, experts = run.model, run.model.experts
    if not experts.count:
        return {}
    losses = {"aux_loss": experts.balance, "seq_aux_loss": experts.document_balance}
    kinds = [kind for kind, coefficient in losses.items() if coefficient]
    return {
        "num_moe_experts": experts.count,
        "moe_layer_freq": [int(number >= experts.dense_layers) for number in range(model.layers)],
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
        "moe_grouped_gemm": on_gpu,
        "moe_permute_fusion": on_gpu,
        "expert_model_parallel_size": run.parallel.ep,
        "expert_tensor_parallel_size": 1,
    }


def draw_experts(model: GPTModel, seed: int) -> None:
    """Draw the experts' weights anew, expert by expert as this project's models do: Transformer Engine draws the first
    product's of all of them before the second's.

    Args:
        model: on GPUs.
        seed: of the stage's weights.
    """
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    mixtures = [layer.mlp.experts for layer in model.decoder.layers if hasattr(layer.mlp, "experts")]
    with torch.no_grad(), get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
        for experts in mixtures:
            for number in range(experts.num_local_experts):
                model.config.init_method(getattr(experts.linear_fc1, f"weight{number}"))
                model.config.output_layer_init_method(getattr(experts.linear_fc2, f"weight{number}"))
