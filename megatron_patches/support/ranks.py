"""Checks Megatron's process groups, and that all ranks were given the same configuration and frozen weights.

Ranks compute parts of each other's attention, so with different configurations results would be wrong. Ranks reduce
gradients together, so with different frozen weights they would wait for each other forever.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer import TransformerConfig

from distca.errors import SupportError
from megatron_patches.support.attached import fields_of

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def check_groups(config: TransformerConfig) -> None:
    """Checks sizes and order of Megatron's process groups.

    Raises:
        SupportError: ``config`` is no TransformerConfig; there are no groups yet; a group's size differs from the
            configuration; or ranks are not in Megatron's default order: tensor-parallel ranks first, then data-parallel
            ranks, then stages.
    """
    if not isinstance(config, TransformerConfig):
        raise SupportError(f"config is a {type(config).__name__}; give CAD the model's TransformerConfig.")
    if not parallel_state.model_parallel_is_initialized():
        raise SupportError(
            "Megatron's process groups are not there yet; call distca.join_world() and "
            "parallel_state.initialize_model_parallel(...) before CAD(...)."
        )
    tp = parallel_state.get_tensor_model_parallel_world_size()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    sizes = {
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": stages,
    }
    if config.num_moe_experts:
        sizes["expert_model_parallel_size"] = parallel_state.get_expert_model_parallel_world_size()
        sizes["expert_tensor_parallel_size"] = parallel_state.get_expert_tensor_parallel_world_size()
    for name, size in sizes.items():
        if getattr(config, name) != size:
            raise SupportError(
                f"{name} is {getattr(config, name)} in the configuration, but Megatron's process groups were made with "
                f"{size}: give the configuration and parallel_state.initialize_model_parallel the same {name}."
            )
    # The key is the distance of neighbouring ranks in the group, for example 1, 2 and 4 in a 2 x 2 x 2 job. If two keys
    # are equal, the earlier group has one rank, needs no check, and drops out of the dict.
    # Ranks of context parallelism count as data-parallel ones here; ``check_config`` refuses them with a reason.
    data_parallel = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strides = {
        1: parallel_state.get_tensor_model_parallel_group(),
        tp: data_parallel,
        tp * data_parallel.size(): parallel_state.get_pipeline_model_parallel_group(),
    }
    if any((np.diff(dist.get_process_group_ranks(group)) != stride).any() for stride, group in strides.items()):
        raise SupportError(
            "Megatron's process groups do not have the default order of ranks, but core attention disaggregation needs "
            "tensor-parallel ranks first, then data-parallel ranks, then stages: leave `order` of "
            "parallel_state.initialize_model_parallel at its default."
        )


def check_same_on_ranks(config: TransformerConfig, arguments: dict[str, Any]) -> None:
    """Compares configurations (by :func:`fields_of`) and ``arguments`` of CAD between ranks, which call this together.

    Numbers, texts, booleans, None, dtypes, lists and tuples are compared, and functions by name.

    Raises:
        SupportError: a value differs. All ranks raise the same message, which names the first such value.
    """
    mine = {name: _in_words(value) for name, value in (fields_of(config) | arguments).items()}
    everyone: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for name, first in everyone[0].items():
        for rank, theirs in enumerate(everyone):
            if theirs.get(name) != first:
                raise SupportError(
                    f"{name} is {theirs.get(name)} on rank {rank} and {first} on rank 0: give every rank the same."
                )


def check_same_frozen(model: LanguageModule) -> None:
    """Compares between ranks, which call this together, which weights of a model are frozen.

    An expert is compared between the ranks that have it, because these ranks reduce its gradients together.

    Raises:
        SupportError: on all ranks, if ranks of a pipeline stage froze different weights; or if an embedding and an
            output layer on two stages share weights, and only one is frozen. The message names the first such weight.
    """
    frozen = [(name, weight) for name, weight in model.named_parameters() if not weight.requires_grad]
    dense = [name for name, weight in frozen if getattr(weight, "allreduce", True)]
    experts = [name for name, weight in frozen if not getattr(weight, "allreduce", True)]
    place = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_expert_model_parallel_rank()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (place, dense, experts))
    by_stage: dict[int, list[str]] = {}
    by_place: dict[tuple[int, int], list[str]] = {}
    for of_rank, of_layers, of_experts in everyone:
        differing = {*by_stage.setdefault(of_rank[0], of_layers)} ^ {*of_layers}
        differing |= {*by_place.setdefault(of_rank, of_experts)} ^ {*of_experts}
        if differing:
            raise SupportError(
                f"{min(differing)} is frozen on some ranks, and trained on others: freeze the same weights on all."
            )
    last = max(by_stage)
    embedding, output = _EMBEDDING in by_stage[0], _OUTPUT in by_stage[last]
    if last and model.share_embeddings_and_output_weights and embedding != output:
        raise SupportError(
            f"{_EMBEDDING} of the first pipeline stage is {_state(embedding)}, but {_OUTPUT} of the last one, with the "
            f"same weights, is {_state(output)}: freeze both, or train both."
        )


def _state(frozen: bool) -> str:
    return "frozen" if frozen else "trained"


def _in_words(value: Any) -> str:
    """Returns the text by which ranks compare a value; "" for a value that is not compared."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_in_words, value))}]"
    value = value.item() if isinstance(value, np.generic) else value
    plain = isinstance(value, bool | int | float | str | torch.dtype | None)
    return repr(value) if plain else getattr(value, "__name__", "")
