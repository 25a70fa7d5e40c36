"""Saves and loads each rank's own part of the distributed optimizer's state, in the format ``fully_reshardable``.

Megatron's distributed optimizer lays a bucket's weights end to end and gives each data-parallel rank one range. A
range may begin and end inside a weight. But checkpoints store rectangular parts of weights, so Megatron by default
gathers the whole state on every rank. Here each rank splits its range into rectangular *boxes* and saves these.

Example: elements [2, 9) of a 3 x 4 weight are three boxes: the end of row 0, all of row 1, and the beginning of row 2.
In place of FP8 weights, checkpoints get the values that these weights would have without FP8.
"""

from __future__ import annotations

import math
import weakref
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
"""A part of a tensor: its first index in each dimension, and its size in each dimension."""


def keep_parts(optimizer: Any) -> None:
    """Replaces methods of Megatron's optimizer, so that each rank saves and loads its own part of the state."""
    for each in optimizer_parts(optimizer):
        if not holds_weights(each):
            each.sharded_state_dict = _nothing
    for each in distributed_parts(optimizer):
        # An optimizer that refers to itself would keep the model's weights after their last user has gone.
        here = weakref.proxy(each)
        each.sharded_param_state_fully_reshardable = partial(_own_part, here)
        each.load_parameter_state_from_fully_reshardable = partial(_take_own_part, here)


def optimizer_parts(optimizer: Any) -> list[Any]:
    """Returns the optimizers inside a chained optimizer, or the optimizer itself."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def holds_weights(part: Any) -> bool:
    """Whether an optimizer has weights on this rank; an optimizer for experts has none on a stage without experts."""
    return any(group["params"] for group in part.param_groups)


def distributed_parts(optimizer: Any) -> list[DistributedOptimizer]:
    return [each for each in optimizer_parts(optimizer) if isinstance(each, DistributedOptimizer)]


def without_fp8(optimizer: Any, model_state: dict[str, Any], is_loading: bool) -> dict[str, Any]:
    """Returns ``model_state``, the result of the model's ``sharded_state_dict``, without FP8 numbers.

    For saving, each FP8 weight is replaced by this rank's boxes of the optimizer's float32 copy (*main weight*), in the
    dtype that the weight would have without FP8. For loading, FP8 weights are left out: they are computed from main
    weights later.
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
    """Returns a function that takes a weight of the model and returns the values that it would have without FP8.

    For a weight that is not FP8 the result shares the weight's memory. All data-parallel ranks must call the function
    together, with the same weights in the same order.
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
    """Yields the boxes of elements [start, stop) of a row-major array of ``shape``, in the order of the elements."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # rows [first, last) lie wholly inside the range
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
    """Takes the place of a method of Megatron that fails for an optimizer without weights."""
    return {}


def _own_part(
    optimizer: DistributedOptimizer, model_state: Any, is_loading: bool = False, metadata: Any = None
) -> dict[int, dict[str, dict[int, ShardedTensor]]]:
    """Returns this rank's boxes: ``result[number of the weight][name][number of the box]``.

    A name is "param", or Adam's name of a moment. For loading the boxes have no data."""
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
    """Sets the optimizer's state from the tensors of loaded boxes, keyed as :func:`_own_part` returns boxes."""
    for number, (weight, _, _) in enumerate(_ranges(optimizer)):
        adam, held = _adam_and_weight(optimizer, weight)
        for name, loaded in part[number].items():
            values = torch.cat([loaded[n].flatten() for n in range(len(loaded))])
            set_state(adam, held, name, values.to(held.device))


def _sharded_weights(model_state: Any) -> dict[torch.Tensor, ShardedTensor | ShardedTensorFactory]:
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    return {each.data: each for each in nested_values(sharded)}


def _ranges(optimizer: DistributedOptimizer) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Yields (weight, start, stop): this rank has elements [start, stop) of the flattened weight."""
    for buffers in optimizer.gbuf_ranges:
        for buckets in buffers.values():
            for bucket in buckets:
                for weight, ranges in bucket["param_map"].items():
                    yield weight, ranges["param"].start, ranges["param"].end


def _adam_and_weight(optimizer: DistributedOptimizer, weight: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Returns Adam, and the parameter in Adam's groups that holds this rank's range of a weight.

    If the parameter is bfloat16, Adam's state holds the float32 weight, or the 16 bits that bfloat16 lacks.
    """
    group, order = optimizer.model_param_group_index_map[weight]
    return optimizer.optimizer, optimizer.optimizer.param_groups[group]["params"][order]


def _states(optimizer: DistributedOptimizer, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return get_states(*_adam_and_weight(optimizer, weight))


def _boxes_of(
    described: ShardedTensor | ShardedTensorFactory,
    weight: torch.Tensor,
    start: int,
    stop: int,
    prefix: str,
    values: torch.Tensor,
) -> Iterator[ShardedTensor]:
    """Yields Megatron's descriptions of the boxes of elements [start, stop) of a weight.

    Args:
        prefix: stands before the weight's key in the checkpoint.
        values: [stop - start] elements of the weight, or of one of its moments.
    """
    # Megatron saves a weight as one or more pieces, and a piece's storage offset says where it begins in the weight. An
    # FP8 weight has no storage of its own, so a "meta" tensor of the same shape takes its place.
    if is_fp8(weight):
        weight = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        described = replace(described, data=weight)
    for piece in pieces(described):
        data = piece.data
        assert data.is_contiguous(), "Megatron cuts weights along their first axis"
        piece_start = data.storage_offset() - weight.storage_offset()
        low, high = max(start, piece_start), min(stop, piece_start + data.numel())
        stacked = piece.prepend_axis_num  # number of axes before the weight's own, such as one for layers
        at = low - start
        for offsets, sizes in boxes(low - piece_start, high - piece_start, tuple(data.shape)):
            count = math.prod(sizes)
            shape = (*(1 for _ in range(stacked)), *sizes)
            yield ShardedTensor(
                f"{prefix}{piece.key}",
                values[at : at + count].view(shape),
                values.dtype,
                shape,
                piece.global_shape,
                tuple(map(sum, zip(piece.global_offset, (*(0 for _ in range(stacked)), *offsets), strict=True))),
                None,
                # Megatron writes the copy whose replica id has only zeros. Only one data-parallel rank has this box.
                (*piece.replica_id[:-1], 0),
                allow_shape_mismatch=piece.allow_shape_mismatch,
            )
            at += count


def pieces(described: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """Returns the tensors that Megatron saves for a weight, for example gate and up projection of an MLP."""
    if isinstance(described, ShardedTensor):
        return [described]
    built = described.build_fn(described.key, described.data, described.replica_id, described.flattened_range)
    return list(nested_values(built))
