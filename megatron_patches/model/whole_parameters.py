"""Cuts whole weights into the parts of ranks, and puts weights and gradients together from the parts of all ranks.

``distca/parity`` loads the same weights into a model that is spread over ranks and into a whole model on one rank, and
compares gradients.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from megatron_patches.model.recurrences import mamba_recurrence, recurrence_of
from megatron_patches.te.fp8_weights import set_values

Divisions = Mapping[str, Sequence[int]]
"""Maps the end of a parameter's name to the relative sizes of the parameter's sections.

Each tensor-parallel rank has an equal part of every section. For example, gate and up projection of an MLP are two
sections of one weight, with sizes (1, 1). Rank 0 of 2 has the first half of gate and the first half of up.
"""

_GATED: Divisions = {"linear_fc1.weight": (1, 1), "linear_fc1.bias": (1, 1)}


def divisions_of(model: torch.nn.Module) -> Divisions:
    """Returns the sections of the parameters that have several: in MLPs with gates, and in recurrent layers."""
    config: Any = model.config
    found = dict(_GATED) if config.gated_linear_unit else {}
    ends = {".".join(name.split(".")[-3:]) for name, _ in model.named_parameters()}
    if "self_attention.in_proj.weight" in ends:
        what = recurrence_of(config)
        q, k, v = what.widths
        found |= {
            # The sections are query, key, value, output gate, beta and alpha.
            "self_attention.in_proj.weight": (q, k, v, v, what.heads, what.heads),
            "conv1d.weight": (q, k, v),
        }
    if "mixer.in_proj.weight" in ends:
        what = mamba_recurrence(config)
        x, b, c = what.widths
        found |= {"mixer.in_proj.weight": (x, x, b, c, what.heads)}  # z, x, B, C and dt
        found |= dict.fromkeys(("conv1d_weight", "conv1d_bias"), (x, b, c))
    return found


def share_of(
    name: str, full: torch.Tensor, shape: torch.Size, rank: int, divisions: Divisions = _GATED
) -> torch.Tensor:
    """Returns a tensor-parallel rank's part of a whole parameter.

    Args:
        shape: shape of the rank's part.
        rank: the rank's number among the tensor-parallel ranks.
        divisions: from :func:`divisions_of`; by default, MLPs have gates and no layer is recurrent.
    """
    if full.shape == shape:
        return full
    dim = next(d for d in range(full.dim()) if full.shape[d] != shape[d])
    sizes = next((parts for end, parts in divisions.items() if name.endswith(end)), (1,))
    ranks, unit = full.shape[dim] // shape[dim], full.shape[dim] // sum(sizes)
    parts = full.split([unit * size for size in sizes], dim)
    return torch.cat([part.chunk(ranks, dim)[rank] for part in parts], dim)


def load_full_weights(model: GPTModel, full: dict[str, torch.Tensor], rank: int) -> None:
    """Copies the parts of tensor-parallel rank ``rank`` from the whole parameters ``full`` into ``model``.

    The keys of ``full`` are parameters' names in ``model``, not in the whole model (:func:`names_in_whole`).
    """
    divisions = divisions_of(model)
    for name, parameter in model.named_parameters():
        set_values(parameter, share_of(name, full[name], parameter.shape, rank, divisions))


def names_in_whole(model: GPTModel, first_layer: int, tied: bool) -> dict[str, str]:
    """Maps each parameter's name on this rank to its name in the whole model.

    Each rank counts its layers and experts from 0.

    Args:
        first_layer: number of this pipeline stage's first layer in the whole model, from 0.
        tied: whether the output layer holds a copy of the embedding's weights.
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
    model: GPTModel, names: Mapping[str, str], weights: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns the whole gradient of every parameter, in float64 on the CPU, by name in the whole model.

    All ranks call this function together.

    Args:
        names: from :func:`names_in_whole`.
        weights: weights of the whole model by name, for their shapes.
    """
    parts = {names[name]: p.main_grad for name, p in model.named_parameters()}
    return gather_whole(parts, weights, divisions_of(model))


def gather_whole(
    parts: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], divisions: Divisions
) -> dict[str, torch.Tensor]:
    """Returns whole parameters or gradients, in float64 on the CPU, by name in the whole model.

    All ranks call this function together.

    Args:
        parts: this rank's parts, by name in the whole model.
        weights: weights of the whole model by name, for their shapes.
    """
    own = {name: gather_shares(name, part.detach(), weights[name].shape, divisions) for name, part in parts.items()}
    # In each of these groups, ranks have different experts or different layers.
    groups = parallel_state.get_expert_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group()
    for group in groups:
        if group.size() == 1:
            continue
        everyone: list[Any] = [None] * group.size()
        dist.all_gather_object(everyone, own, group=group)
        own = {name: gradient for rank in everyone for name, gradient in rank.items()}
    return own


def first_expert(model: GPTModel) -> int:
    """Returns the number of this rank's first expert in the whole model, from 0."""
    ranks = parallel_state.get_expert_model_parallel_world_size()
    return parallel_state.get_expert_model_parallel_rank() * ((model.config.num_moe_experts or 0) // ranks)


def gather_shares(name: str, share: torch.Tensor, full: torch.Size, divisions: Divisions = _GATED) -> torch.Tensor:
    """Returns a whole tensor from the parts of all tensor-parallel ranks, in float64 on the CPU.

    All tensor-parallel ranks call this function together. ``full`` is the shape of the whole tensor.
    """
    if share.shape == full:
        return share.double().cpu()
    tp = parallel_state.get_tensor_model_parallel_world_size()
    shares = [torch.empty_like(share) for _ in range(tp)]
    dist.all_gather(shares, share.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    whole = torch.empty(full, dtype=torch.float64)
    # Element i of ``numbers`` is i, so a rank's part of ``numbers`` says where the elements of its share belong.
    numbers = torch.arange(whole.numel()).view(full)
    for rank, part in enumerate(shares):
        whole.view(-1)[share_of(name, numbers, share.shape, rank, divisions).flatten()] = part.double().cpu().flatten()
    return whole
