"""Weights that exist as FP8 numbers and scales only, without a bfloat16 copy; for Transformer Engine's linear layers.

Megatron builds such weights where its configuration says ``fp8_param``. Its optimizer keeps float32 main weights. They
are made from the numbers that initialisation drew, and not from the FP8 numbers, which are rounded already. After an
update ranks gather FP8 numbers.

On Hopper a product in backward reads a weight by columns, from a transposed copy. Transformer Engine makes that copy
and keeps it, which doubles a weight's memory. Here the copy is made for each product in backward, and dropped after it.
So a weight takes one byte for each parameter.
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
    """Whether a weight is FP8 numbers and scales. Its ``dtype`` does not say so: that is bfloat16 also for FP8."""
    return bool(fp8_utils.is_float8tensor(weight))


def has_fp8_weights(model: torch.nn.Module) -> bool:
    """Whether some weight of a model is FP8 numbers and scales."""
    return any(is_fp8(weight) for weight in model.parameters())


def keep_rows_only(weight: Any) -> None:
    """Drops the transposed copy of a weight's FP8 numbers; a later quantisation makes none either."""
    weight._quantizer.set_usage(rowwise=True, columnwise=False)
    forget_columns(weight)
    _cast_parts_by_rows()
    # Megatron's function, which this replaces, makes the transposed copies of all weights after every update.
    fp8_utils.te_post_all_gather_processing = forget_columns


def break_reference_cycle(weight: Any) -> None:
    """Makes the memory of a weight, and of its main weight, free as soon as nothing uses the weight any more.

    Transformer Engine stores two bound methods as attributes of the weight, so the weight refers to itself. Python
    frees tensors in such a cycle late or never. Here the methods hold the weight by a weak reference."""
    here = weakref.ref(weight)

    def bound(method: Any) -> Callable[[], Any]:
        return lambda: method(here())

    for name in ("get_high_precision_init_val", "clear_high_precision_init_val"):
        if hasattr(weight, name):  # models that are built without gradients have none
            setattr(weight, name, bound(getattr(weight, name).__func__))


@cache
def _cast_parts_by_rows() -> None:
    """Replaces Transformer Engine's cast of a one-dimensional tensor to FP8 by one without a transposed copy.

    The distributed optimizer casts its part of a weight as one long row. With current scaling Transformer Engine would
    make a transposed copy too, by a kernel that takes 70 ms for a billion weights."""
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
    """Sets a weight before the optimizer is built, and with it the float32 main weight that will be made of it.

    Args:
        weight: a weight, FP8 or not.
        values: the numbers in the weight's shape, of any dtype and on any device.
    """
    with torch.no_grad():
        if is_fp8(weight):
            values = values.to(weight.device, weight.dtype)  # rounded to bfloat16 first, as a weight without FP8
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
    """Sets all weights from the optimizers' float32 main weights, which a checkpoint has just set.

    Args:
        model: the model in Megatron's wrapper for data parallelism.
        optimizers: Megatron's distributed optimizers of the model's weights.
    """
    for optimizer in optimizers:
        optimizer._copy_main_params_to_model_params()
    model.start_param_sync(force_sync=True)
