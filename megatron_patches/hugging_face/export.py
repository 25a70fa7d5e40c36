"""Writes a model that is spread over many ranks as one Hugging Face folder.

A *slot* (``slots.py``) links a parameter to its tensors in the folder. A rank has a *share*: all of a
parameter, its tensor-parallel part, or the weight of one of its experts. Ranks of a pipeline stage gather the shares of
one parameter at a time, and one rank of the stage writes the stage's files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
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
from distca.models.folder import ExportedModel, ShardWriter, begin, clear, count_shards, finish
from megatron_patches.hugging_face.slots import Slot
from megatron_patches.hugging_face.weights import biases_of_choice, group_of, slots

Values = Callable[[torch.Tensor], torch.Tensor]


def export_weights(
    model: DistributedDataParallel | GPTModel,
    exported: ExportedModel,
    folder: Path,
    values: Values = torch.Tensor.detach,
) -> None:
    """Writes the model's folder; all ranks call this function together.

    A rank that writes holds one file at a time in host memory. If the folder has a layer's experts as one tensor, the
    rank holds these too.

    Args:
        folder: an empty or missing folder that all ranks see.
        values: function from a weight to the values to write, for example the optimizer's float32 values. All
            data-parallel ranks call ``values`` together for each weight.

    Raises:
        CheckpointError: on all ranks, if any rank cannot write.
    """
    file_of: dict[str, str] = {}
    problem = _on_first_rank(lambda: begin(folder))
    if problem is not None:
        raise CheckpointError(f"{folder} could not be written ({problem}).")
    if _has_shares(by_expert=False) or _has_shares(by_expert=True):
        problem, file_of = _write_stage(unwrap_model(model), exported, folder, values)
    else:  # other ranks write these weights, but all data-parallel ranks call ``values``, which may be a collective
        for weight, _ in _own_slots(unwrap_model(model), exported.model):
            values(weight)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (problem, file_of))
    problem = next((said for said, _ in everyone if said), None)
    if problem is None:
        whole = {name: file for _, files in everyone for name, file in files.items()}
        problem = _on_first_rank(lambda: finish(folder, whole, exported))
    if problem is not None:
        if dist.get_rank() == 0:
            clear(folder)  # frees space, as the disk may be full
        raise CheckpointError(f"{folder} could not be written ({problem}).")


def _on_first_rank(work: Callable[[], None]) -> str | None:
    """Runs ``work`` on rank 0; returns on all ranks the text of its error, or None."""
    said: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            work()
        except Exception as error:  # other ranks wait for this rank in the broadcast
            said = [f"rank 0: {error}"]
    dist.broadcast_object_list(said)
    return said[0]


def _write_stage(
    gpt: GPTModel, exported: ExportedModel, folder: Path, values: Values
) -> tuple[str | None, dict[str, str]]:
    """Writes this stage's files; returns this rank's error or None, and the file of each tensor that it wrote."""
    own = _own_slots(gpt, exported.model)
    biases = list(biases_of_choice(gpt, exported.model))
    group = parallel_state.get_pipeline_model_parallel_group()
    counts: list[Any] = [None] * group.size()
    # The folder that training began with may have tensors of no parameter, such as an image encoder's. The first stage
    # copies these "others".
    first = parallel_state.is_pipeline_first_stage()
    mine = count_shards(exported, [name for _, slot in own + biases for name in slot.names], others=first)
    dist.all_gather_object(counts, mine, group=group)
    first_file, files = 1 + sum(counts[: group.rank()]), sum(counts)  # files of all stages are numbered from 1
    writer = ShardWriter(folder, first_file, files, exported.stored, exported.model.experts.count)
    writes = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_data_parallel_rank() == 0
    problem: str | None = None
    for slot, shares in chain(_gathered(own, values), _gathered(biases, _as_is)):
        if writes and problem is None:
            try:
                for name, tensor in zip(slot.names, slot.tensors(shares), strict=True):
                    writer.add(name, tensor.to("cpu", getattr(torch, exported.dtype_of(name)), copy=True))
            except Exception as error:  # the loop goes on, because other ranks wait for this rank in collectives
                problem = f"rank {dist.get_rank()}: {error}"
    if problem is None:
        try:
            if writes and first:
                writer.add_others(exported)
            writer.flush()
        except Exception as error:
            problem = f"rank {dist.get_rank()}: {error}"
    return problem, writer.file_of


def _has_shares(by_expert: bool) -> bool:
    """Whether the export takes this rank's shares of experts' weights, or with ``by_expert`` False of other weights.

    Data-parallel ranks have copies of the same shares. The export takes the copy on data-parallel rank 0.
    """
    if by_expert:
        return parallel_state.get_expert_data_parallel_rank() == 0
    return parallel_state.get_data_parallel_rank() == 0


def _own_slots(gpt: GPTModel, described: ModelDescription) -> list[tuple[torch.Tensor, Slot]]:
    """Returns this stage's parameters with their slots, without an output layer that is a copy of the embedding."""
    copied = described.tie_embeddings and not parallel_state.is_pipeline_first_stage()
    copy = gpt.output_layer.weight if copied and gpt.post_process else None
    return [(parameter, slot) for parameter, slot in slots(gpt, described) if parameter is not copy]


def _gathered(own: Sequence[tuple[torch.Tensor, Slot]], values: Values) -> Iterator[tuple[Slot, list[torch.Tensor]]]:
    """Yields each parameter's slot with all ranks' shares. A rank whose shares are not exported gets its own only."""
    for weight, slot in own:
        parameter, group = values(weight), group_of(slot)
        shares = [parameter]
        if group.size() > 1 and _has_shares(slot.by_expert):
            shares = [torch.empty_like(parameter) for _ in range(group.size())]
            dist.all_gather(shares, parameter.contiguous(), group=group)
        yield slot, shares


def _as_is(buffer: torch.Tensor) -> torch.Tensor:
    # Routers' biases are buffers, of which the optimizer has no values.
    return buffer
