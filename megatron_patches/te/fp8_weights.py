"""Weights of Transformer Engine's linear layers that are FP8 numbers and their scales, without a bfloat16 copy.

Megatron-Core builds them where its configuration says ``fp8_param``. It makes float32 main weights from the numbers
that were drawn, before these are quantised. After an update it gathers FP8 numbers. On Hopper a product in backward
reads a weight by its columns. For that Transformer Engine makes a transposed copy and keeps it. Here each of these
products makes the copy and drops it, so that a weight takes one byte a parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import fp8_utils, parallel_state
from megatron.core.distributed import DistributedDataParallel


def is_fp8(weight: torch.Tensor) -> bool:
    """Whether a weight is FP8 numbers and their scales; its dtype is bfloat16 in either case."""
    return bool(fp8_utils.is_float8tensor(weight))


def has_fp8_weights(model: torch.nn.Module) -> bool:
    return any(is_fp8(weight) for weight in model.parameters())


def keep_rows_only(weight: Any) -> None:
    """Makes a weight hold its rows alone, also after it is quantised anew."""
    weight._quantizer.set_usage(rowwise=True, columnwise=False)
    forget_columns(weight)
    _cast_parts_by_rows()
    # Else Megatron would make the transposed copies of all weights after every update.
    fp8_utils.te_post_all_gather_processing = forget_columns


def break_reference_cycle(weight: Any) -> None:
    """Makes a weight, and the main weight that it refers to, be freed with their last user.

    Transformer Engine gives a weight two methods that are bound to it, and a tensor in such a cycle is freed late or
    never."""
    here = weakref.ref(weight)

    def bound(method: Any) -> Callable[[], Any]:
        return lambda: method(here())

    for name in ("get_high_precision_init_val", "clear_high_precision_init_val"):
        if hasattr(weight, name):  # models that are built without gradients have none
            setattr(weight, name, bound(getattr(weight, name).__func__))


@cache
def _cast_parts_by_rows() -> None:
    """Makes the cast of main weights to a part of a weight, which is one long row, leave out its transposed copy.

    With current scaling Transformer Engine makes one, by a kernel that takes 70 ms for a billion weights."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    cast = Float8Quantizer.update_quantized

    def update_quantized(self: Any, src: torch.Tensor, dst: Any, **options: Any) -> Any:
        if dst.ndim == 1:
            self.set_usage(columnwise=False)
        return cast(self, src, dst, **options)

    Float8Quantizer.update_quantized = update_quantized


def forget_columns(weights: Any) -> None:
    """Drops the transposed copy of a weight, or of each weight in a list."""
    for weight in weights if isinstance(weights, list) else [weights]:
        if is_fp8(weight):
            weight.update_usage(rowwise_usage=True, columnwise_usage=False)


def set_values(weight: torch.Tensor, values: torch.Tensor) -> None:
    """Sets a weight, and the numbers that its main weight will be made of, before the optimizer is built.

    Args:
        weight: a weight of any kind.
        values: numbers in its shape, of any type and on any device.
    """
    with torch.no_grad():
        if is_fp8(weight):
            values = values.to(weight.device, weight.dtype)  # to bfloat16 first, as without FP8
            weight._high_precision_init_val.copy_(values)  # type: ignore[attr-defined]
        weight.copy_(values)


def broadcast_weights(model: DistributedDataParallel) -> None:
    """Copies the weights of the first data-parallel rank to all others, before the optimizer is built."""
    if not has_fp8_weights(model):
        model.broadcast_params()
        return
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    first = dist.get_global_rank(group, 0)
    for weight in model.parameters():
        if not is_fp8(weight):
            dist.broadcast(weight.data, first, group)
        elif group.size() > 1:
            drawn = weight._high_precision_init_val.to(weight.device)
            dist.broadcast(drawn, first, group)
            set_values(weight, drawn)


def quantise_main_weights(model: DistributedDataParallel, optimizers: Iterable[Any]) -> None:
    """Sets all weights from main weights that were loaded, as an update does.

    Args:
        model: the wrapped model.
        optimizers: megatron's distributed optimizers of its weights.
    """
    for optimizer in optimizers:
        optimizer._copy_main_params_to_model_params()
    model.start_param_sync(force_sync=True)
