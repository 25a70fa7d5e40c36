"""Saves and loads each rank's own part of the distributed optimizer's state, without gathering anything.

megatron's distributed optimizer lays all weights end to end and gives every data-parallel rank a range of them, whose
ends fall anywhere in a weight. To save that in the shapes of the weights, megatron (0.16.1) gathers the whole state on
every rank, 12 bytes of host memory per weight. Here a rank describes its range as boxes, which megatron's checkpoints
can hold side by side: the end of a row, whole rows, the beginning of a row. Names and shapes are megatron's.

Example: elements [2, 9) of a 3 x 4 weight are the boxes row 0 from 2 on, row 1, and row 2 up to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_patches.checkpoint.adam_state import get_states, set_state
from megatron_patches.te.fp8_weights import is_fp8

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The offsets and the sizes of a box in a weight, by dimension."""


def keep_parts(optimizer: Any) -> None:
    """Makes ``sharded_state_dict`` and ``load_state_dict`` of megatron's optimizer, or of those that it chains, handle
    this rank's own part only."""
    for each in optimizer_parts(optimizer):
        if not holds_weights(each):
            each.sharded_state_dict = _nothing
    for each in distributed_parts(optimizer):
        each.sharded_param_state_fully_reshardable = partial(_own_part, each)
        each.load_parameter_state_from_fully_reshardable = partial(_take_own_part, each)


def optimizer_parts(optimizer: Any) -> list[Any]:
    """Returns megatron's optimizer itself, or the optimizers that it chains, for experts and for all other weights."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def holds_weights(part: Any) -> bool:
    """Whether this rank has weights for an optimizer; on a stage of dense layers there are no experts."""
    return any(group["params"] for group in part.param_groups)


def distributed_parts(optimizer: Any) -> list[DistributedOptimizer]:
    """Returns the distributed optimizers of :func:`optimizer_parts`."""
    return [each for each in optimizer_parts(optimizer) if isinstance(each, DistributedOptimizer)]


def without_fp8(optimizer: Any, model_state: dict[str, Any], is_loading: bool) -> dict[str, Any]:
    """Returns a model's state with this rank's boxes of main weights in place of FP8 weights.

    They have the type that the weights would have without FP8, so that a checkpoint is the same as without. For
    loading, FP8 weights are left out, as they follow from the loaded main weights.

    Args:
        optimizer: the model's optimizer.
        model_state: result of the model's ``sharded_state_dict``.
        is_loading: whether the state is to be loaded.
    """
    quantised = {
        name: each
        for name, each in model_state.items()
        if isinstance(each, ShardedTensor | ShardedTensorFactory) and is_fp8(each.data)
    }
    state = {name: each for name, each in model_state.items() if name not in quantised}
    if is_loading:
        return state
    name_of = {each.data: name for name, each in quantised.items()}
    for part in distributed_parts(optimizer):
        for weight, start, stop in _ranges(part):
            if weight in name_of:
                described = quantised[name_of[weight]]
                values = _states(part, weight)["param"].to(weight.dtype)
                boxes_of = _boxes_of(described, weight, start, stop, "", values)
                state[name_of[weight]] = dict(enumerate(boxes_of))
    return state


def main_values(optimizer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that returns a weight of the model as it would be without FP8.

    It takes FP8 weights from their main weights, and others as they are. All data-parallel ranks give their ranges of a
    main weight, so all of them call it for the same weights.

    Args:
        optimizer: of the model.
    """
    ranges = {
        weight: (part, start, stop) for part in distributed_parts(optimizer) for weight, start, stop in _ranges(part)
    }

    def values_of(weight: torch.Tensor) -> torch.Tensor:
        if not is_fp8(weight):
            return weight.detach()
        whole = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        if weight in ranges:
            part, start, stop = ranges[weight]
            whole.view(-1)[start:stop] = _adam_and_weight(part, weight)[1].detach()
        dist.all_reduce(whole, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return whole

    return values_of


def boxes(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """Yields boxes that together are elements [start, stop) of a row-major array of ``shape``, in that order."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # the range lies inside of one row
        yield from _in_row(start, stop, last, shape)
        return
    yield from _in_row(start, first * row, first - 1, shape)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(last * row, stop, last, shape)


def _in_row(start: int, stop: int, row: int, shape: tuple[int, ...]) -> Iterator[Box]:
    before = row * math.prod(shape[1:])
    for offsets, sizes in boxes(start - before, stop - before, shape[1:]):
        yield (row, *offsets), (1, *sizes)


def _nothing(*_: Any, **__: Any) -> dict[str, Any]:
    """Returns the state of an optimizer without weights: nothing, where megatron would ask for a number of steps."""
    return {}


def _own_part(
    optimizer: DistributedOptimizer, model_state: Any, is_loading: bool = False, metadata: Any = None
) -> dict[int, dict[str, dict[int, ShardedTensor]]]:
    """Returns this rank's boxes, by number of the weight and name of its state; without data where they are to be
    loaded."""
    described = _sharded_weights(model_state)
    part = {}
    for number, (weight, start, stop) in enumerate(_ranges(optimizer)):
        part[number] = {
            name: {
                n: replace(box, data=None) if is_loading else box
                for n, box in enumerate(
                    _boxes_of(described[weight], weight, start, stop, f"optimizer.state.{name}.", values)
                )
            }
            for name, values in _states(optimizer, weight).items()
        }
    return part


def _take_own_part(optimizer: DistributedOptimizer, part: dict[int, dict[str, dict[int, torch.Tensor]]]) -> None:
    for number, (weight, _, _) in enumerate(_ranges(optimizer)):
        adam, held = _adam_and_weight(optimizer, weight)
        for name, loaded in part[number].items():
            values = torch.cat([loaded[n].flatten() for n in range(len(loaded))])
            set_state(adam, held, name, values.to(held.device))


def _sharded_weights(model_state: Any) -> dict[torch.Tensor, ShardedTensor | ShardedTensorFactory]:
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    return {each.data: each for each in nested_values(sharded)}


def _ranges(optimizer: DistributedOptimizer) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Yields (weight, start, stop) for the weights of which this rank has elements [start, stop)."""
    for buffers in optimizer.gbuf_ranges:
        for buckets in buffers.values():
            for bucket in buckets:
                for weight, ranges in bucket["param_map"].items():
                    yield weight, ranges["param"].start, ranges["param"].end


def _adam_and_weight(optimizer: DistributedOptimizer, weight: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Returns the optimizer that updates this rank's range of a weight, and the range as the optimizer holds it. The
    range is in float32; where the optimizer holds such weights itself, it is in the model's type."""
    group, order = optimizer.model_param_group_index_map[weight]
    return optimizer.optimizer, optimizer.optimizer.param_groups[group]["params"][order]


def _states(optimizer: DistributedOptimizer, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the float32 weights and moments of this rank's range of a weight, flat; steps are counted elsewhere."""
    return get_states(*_adam_and_weight(optimizer, weight))


def _boxes_of(
    described: ShardedTensor | ShardedTensorFactory,
    weight: torch.Tensor,
    start: int,
    stop: int,
    prefix: str,
    values: torch.Tensor,
) -> Iterator[ShardedTensor]:
    """Yields boxes with the values of elements [start, stop) of a weight, under the prefix and the weight's key."""
    if is_fp8(weight):  # addresses tell where a piece begins, and FP8 weights have none
        weight = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        described = replace(described, data=weight)
    for piece in _pieces(described):
        data = piece.data
        assert data.is_contiguous(), "megatron cuts weights along their first axis"
        begins = data.storage_offset() - weight.storage_offset()
        low, high = max(start, begins), min(stop, begins + data.numel())
        ahead = piece.prepend_axis_num
        at = low - start
        for offsets, sizes in boxes(low - begins, high - begins, tuple(data.shape)):
            count = math.prod(sizes)
            shape = (*(1 for _ in range(ahead)), *sizes)
            yield ShardedTensor(
                f"{prefix}{piece.key}",
                values[at : at + count].view(shape),
                values.dtype,
                shape,
                piece.global_shape,
                tuple(map(sum, zip(piece.global_offset, (*(0 for _ in range(ahead)), *offsets), strict=True))),
                None,
                # No other data-parallel rank has this box.
                (*piece.replica_id[:-1], 0),
                allow_shape_mismatch=piece.allow_shape_mismatch,
            )
            at += count


def _pieces(described: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """Returns the tensors as which a weight is saved: one, or several for gate and up of an MLP on tensor-parallel
    ranks."""
    if isinstance(described, ShardedTensor):
        return [described]
    built = described.build_fn(described.key, described.data, described.replica_id, described.flattened_range)
    return list(nested_values(built))
