"""Gradients of the whole model, gathered from tensor-parallel shares and pipeline stages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from megatron_patches.parity.weights import share_of


def names_in_whole(model: GPTModel, first_layer: int, tied: bool) -> dict[str, str]:
    """By name in a stage's ``model``, every parameter's name in the model without pipeline stages.

    Args:
        model: a stage, whose layers are counted from 0.
        first_layer: number of its first layer in the whole model.
        tied: its output layer holds a copy of the embedding's weights.
    """

    def in_whole(name: str) -> str:
        if tied and name == "output_layer.weight":
            return "embedding.word_embeddings.weight"
        name = re.sub(
            r"local_experts\.(\d+)", lambda match: f"local_experts.{int(match[1]) + first_expert(model)}", name
        )
        return re.sub(r"decoder\.layers\.(\d+)", lambda match: f"decoder.layers.{int(match[1]) + first_layer}", name)

    return {name: in_whole(name) for name, _ in model.named_parameters()}


def gather_gradients(
    model: GPTModel, names: Mapping[str, str], weights: Mapping[str, torch.Tensor], gated: bool
) -> dict[str, torch.Tensor]:
    """Every parameter's full gradient by its name in the whole model, float64 on the CPU; every rank calls it.

    Args:
        model: this rank's part, with gradients in ``main_grad``.
        names: from :func:`names_in_whole`.
        weights: of the whole model, for their shapes.
        gated: the MLPs have a gate.
    """
    own = {
        names[name]: gather_shares(names[name], p.main_grad, weights[names[name]].shape, gated)
        for name, p in model.named_parameters()
    }
    groups = parallel_state.get_expert_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group()
    for group in groups:
        everyone: list[Any] = [None] * group.size()
        dist.all_gather_object(everyone, own, group=group)
        own = {name: gradient for rank in everyone for name, gradient in rank.items()}
    return own


def first_expert(model: GPTModel) -> int:
    """Number of this rank's first expert in the whole model."""
    ranks = parallel_state.get_expert_model_parallel_world_size()
    return parallel_state.get_expert_model_parallel_rank() * ((model.config.num_moe_experts or 0) // ranks)


def gather_shares(name: str, share: torch.Tensor, full: torch.Size, gated: bool = True) -> torch.Tensor:
    """The full gradient from every tensor-parallel rank's share, float64 on the CPU."""
    if share.shape == full:
        return share.double().cpu()
    tp = parallel_state.get_tensor_model_parallel_world_size()
    shares = [torch.empty_like(share) for _ in range(tp)]
    dist.all_gather(shares, share.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    whole = torch.empty(full, dtype=torch.float64)
    # Where each element of the full tensor went is found by sharding its element numbers.
    numbers = torch.arange(whole.numel()).view(full)
    for rank, part in enumerate(shares):
        whole.view(-1)[share_of(name, numbers, share.shape, rank, gated).flatten()] = part.double().cpu().flatten()
    return whole
