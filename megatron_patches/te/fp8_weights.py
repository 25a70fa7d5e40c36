"""FP8 weights of Transformer Engine's linear layers: the model holds FP8 numbers and scales, and no bfloat16 copies.

Megatron builds such weights if its configuration sets ``fp8_param``. Megatron's optimizer keeps a float32 *main weight*
of each. The main weight begins as the initial value before rounding to FP8.

For backward on Hopper GPUs Transformer Engine makes a transposed copy of a weight's FP8 numbers, and keeps the copy.
Dropping the copy after use saves one byte for each element. In names, "columns" means the transposed copy.
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
    """Whether a weight is stored in FP8; ``weight.dtype`` does not say so, it is bfloat16."""
    return bool(fp8_utils.is_float8tensor(weight))


def has_fp8_weights(model: torch.nn.Module) -> bool:
    return any(is_fp8(weight) for weight in model.parameters())


def keep_rows_only(weight: Any) -> None:
    """Drops the transposed copy of an FP8 weight, and keeps later quantisations from making one."""
    weight._quantizer.set_usage(rowwise=True, columnwise=False)
    forget_columns(weight)
    _cast_parts_by_rows()
    # Megatron calls ``te_post_all_gather_processing`` after every update. Megatron's version makes transposed copies.
    fp8_utils.te_post_all_gather_processing = forget_columns


def break_reference_cycle(weight: Any) -> None:
    """Lets Python free a weight as soon as nothing else uses it.

    Two attributes of the weight are bound methods that refer to the weight. The new attributes have a weak reference.
    """
    here = weakref.ref(weight)

    def bound(method: Any) -> Callable[[], Any]:
        return lambda: method(here())

    for name in ("get_high_precision_init_val", "clear_high_precision_init_val"):
        if hasattr(weight, name):
            setattr(weight, name, bound(getattr(weight, name).__func__))


@cache
def _cast_parts_by_rows() -> None:
    """Makes Transformer Engine cast one-dimensional tensors to FP8 without a transposed copy.

    The distributed optimizer casts this rank's part of a weight as a one-dimensional tensor. To transpose a billion
    elements would take 70 ms.
    """
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    cast = Float8Quantizer.update_quantized

    def update_quantized(self: Any, src: torch.Tensor, dst: Any, **options: Any) -> Any:
        if dst.ndim == 1:
            self.set_usage(columnwise=False)
        return cast(self, src, dst, **options)

    Float8Quantizer.update_quantized = update_quantized


def forget_columns(weights: Any) -> None:
    """Drops the transposed copy of an FP8 weight, or of each FP8 weight in a list."""
    for weight in weights if isinstance(weights, list) else [weights]:
        if is_fp8(weight):
            weight.update_usage(rowwise_usage=True, columnwise_usage=False)


def set_values(weight: torch.Tensor, values: torch.Tensor) -> None:
    """Sets a weight, before the optimizer is built. The optimizer makes the main weight from ``values``.

    ``values`` have the weight's shape, any dtype and any device.
    """
    with torch.no_grad():
        if is_fp8(weight):
            values = values.to(weight.device, weight.dtype)  # rounds to bfloat16, like weights that are not FP8
            weight._high_precision_init_val.copy_(values)  # type: ignore[attr-defined]
        weight.copy_(values)


def broadcast_weights(model: DistributedDataParallel) -> None:
    """Copies the first data-parallel rank's weights to the other data-parallel ranks, before the optimizer is built."""
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
    """Sets all weights from the distributed optimizers' main weights; all ranks call this together."""
    for optimizer in optimizers:
        optimizer._copy_main_params_to_model_params()
    model.start_param_sync(force_sync=True)
