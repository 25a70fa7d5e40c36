"""A model on all its ranks, written as one Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import unwrap_model

from distca.errors import CheckpointError
from distca.models.description import ModelDescription
from distca.models.folder import ShardWriter, count_shards, finish
from distca.models.layout import expected_shapes
from megatron_patches.weights import Slot, slots


def export_weights(
    model: DistributedDataParallel | GPTModel,
    described: ModelDescription,
    fields: Mapping[str, Any],
    dtype: torch.dtype,
    folder: Path,
    source: Path | None = None,
    advance: Callable[[int], object] = lambda size: None,
) -> None:
    """Write the model's folder; every rank calls it. Each stage's first rank writes its stage's files, and holds one
    file at a time in host memory.

    Args:
        model: with all weights on this rank's device.
        described: what config.json says.
        fields: the content of config.json.
        dtype: of the tensors.
        folder: an empty one, which all ranks see.
        source: the folder that training began with, for what comes along; None where there was none.
        advance: called with the bytes of each parameter.

    Raises:
        CheckpointError: on every rank, if one cannot write.
    """
    problem: str | None = None
    file_of: dict[str, str] = {}
    if parallel_state.get_data_parallel_rank() == 0:
        own = _own_slots(unwrap_model(model), described)
        first, files = _numbers(own, described, dtype)
        writer = ShardWriter(folder, first, files)
        writes = parallel_state.get_tensor_model_parallel_rank() == 0
        for slot, tensors in _whole_tensors(own, dtype, writes):
            try:
                if writes and problem is None:
                    for name, tensor in zip(slot.names, tensors, strict=True):
                        writer.add(name, tensor)
                        advance(tensor.numel() * tensor.element_size())
            except Exception as error:  # the others wait in collectives, which this rank has to go on with
                problem = f"rank {dist.get_rank()}: {error}"
        try:
            if writes and problem is None:
                writer.flush()
        except Exception as error:
            problem = f"rank {dist.get_rank()}: {error}"
        file_of = writer.file_of
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (problem, file_of))
    problem = next((said for said, _ in everyone if said), None)
    if problem is None and dist.get_rank() == 0:
        try:
            total = sum(torch.Size(shape).numel() for shape in expected_shapes(described).values()) * dtype.itemsize
            finish(
                folder,
                {name: file for _, files_of in everyone for name, file in files_of.items()},
                total,
                fields,
                source,
            )
        except OSError as error:
            problem = f"rank 0: {error}"
    said = [problem]
    dist.broadcast_object_list(said)
    if said[0] is not None:
        raise CheckpointError(f"{folder} could not be written ({said[0]}).")


def _own_slots(gpt: GPTModel, described: ModelDescription) -> list[tuple[torch.Tensor, Slot]]:
    """This stage's parameters; of tied weights the first stage's only."""
    copied = described.tie_embeddings and not parallel_state.is_pipeline_first_stage()
    copy = gpt.output_layer.weight if copied and gpt.post_process else None
    return [(parameter.detach(), slot) for parameter, slot in slots(gpt, described) if parameter is not copy]


def _numbers(
    own: Sequence[tuple[torch.Tensor, Slot]], described: ModelDescription, dtype: torch.dtype
) -> tuple[int, int]:
    """Number of this stage's first file, and files of all stages."""
    shapes = expected_shapes(described)
    sizes = [torch.Size(shapes[name]).numel() * dtype.itemsize for _, slot in own for name in slot.names]
    group = parallel_state.get_pipeline_model_parallel_group()
    counts: list[Any] = [None] * group.size()
    dist.all_gather_object(counts, count_shards(sizes), group=group)
    return 1 + sum(counts[: group.rank()]), sum(counts)


def _whole_tensors(
    own: Sequence[tuple[torch.Tensor, Slot]], dtype: torch.dtype, writes: bool
) -> Iterator[tuple[Slot, tuple[torch.Tensor, ...]]]:
    """A parameter's tensors on the host of the rank that writes, one parameter after the other."""
    group = parallel_state.get_tensor_model_parallel_group()
    for parameter, slot in own:
        shares = [parameter]
        if group.size() > 1:
            shares = [torch.empty_like(parameter) for _ in range(group.size())]
            dist.all_gather(shares, parameter.contiguous(), group=group)
        yield slot, tuple(tensor.to("cpu", dtype, copy=True) for tensor in slot.tensors(shares)) if writes else ()
