"""Stands for Transformer Engine's FP8 tensors on CPUs: numbers of one byte and a scale for all of them, with a
transposed copy where it is asked for, which nothing but :meth:`Float8Tensor.update_usage` and
:func:`post_all_gather_processing` bring up to date or drop."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist


class Quantizer:
    def __init__(self, rowwise: bool = True, columnwise: bool = True) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def copy(self) -> Quantizer:
        return Quantizer(self.rowwise_usage, self.columnwise_usage)


class Float8Quantizer(Quantizer):
    """With a scale that is given, and both copies unless told otherwise."""

    rows_transposed: ClassVar[int] = 0
    """How often a single row, a part of a weight, was cast with a transposed copy."""

    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        self.scale = scale

    def update_quantized(self, src: torch.Tensor, dst: Float8Tensor) -> None:
        dst._data.copy_((src.float() * self.scale).to(torch.float8_e4m3fn).view(torch.uint8))
        Float8Quantizer.rows_transposed += dst.ndim == 1 and self.columnwise_usage


def scale_of(largest: torch.Tensor) -> torch.Tensor:
    return 448 / largest.float().clamp(min=1e-12)


class Float8Tensor(torch.Tensor):
    """As a tensor it has a dtype and no memory.

    Args:
        numbers: float8_e4m3fn, as bytes.
        scale_inv: one float32 number.
        dtype: that it says it has.
        quantizer: which copies it shall have when it is quantised anew.
    """

    _data: torch.Tensor
    _scale_inv: torch.Tensor
    _transpose: torch.Tensor | None
    _quantizer: Quantizer

    def __new__(cls, numbers: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype, quantizer: Quantizer) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=dtype, device=numbers.device)  # type: ignore[attr-defined]
        made._data, made._scale_inv, made._transpose, made._quantizer = numbers, scale_inv, None, quantizer.copy()
        return made

    @classmethod
    def of(cls, values: torch.Tensor) -> Float8Tensor:
        """Values, quantised, with both copies."""
        made: Float8Tensor = cls(torch.empty(values.shape, dtype=torch.uint8), torch.ones(1), values.dtype, Quantizer())
        made.quantize_(values)
        return made

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        return (self._data.view(torch.float8_e4m3fn).float() * self._scale_inv).to(dtype or self.dtype)

    def quantize_(self, values: torch.Tensor) -> None:
        scale = scale_of(values.abs().max())
        self._scale_inv.copy_(1 / scale)
        self._data.copy_((values.float() * scale).to(torch.float8_e4m3fn).view(torch.uint8))
        self._transpose = self._data.t().contiguous() if self._quantizer.columnwise_usage else None

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        assert rowwise_usage is not False
        if columnwise_usage and self._transpose is None:
            self._transpose = self._data.t().contiguous()
        elif columnwise_usage is False:
            self._transpose = None

    def get_usages(self) -> dict[str, bool]:
        return {"rowwise": True, "columnwise": self._transpose is not None}

    def detach(self) -> Float8Tensor:
        made: Float8Tensor = Float8Tensor(self._data, self._scale_inv, self.dtype, self._quantizer)
        made._transpose = self._transpose
        return made

    def expand_as(self, other: torch.Tensor) -> torch.Tensor:
        return _Identity.apply(self)  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.ops.aten.detach.default:
            return args[0].detach()
        if func == torch.ops.aten.copy_.default and isinstance(args[0], Float8Tensor):
            source = args[1]
            args[0].quantize_(source.dequantize() if isinstance(source, Float8Tensor) else source)
            return args[0]
        assert not func._schema.is_mutable, func
        plain = [each.dequantize() if isinstance(each, Float8Tensor) else each for each in args]
        return func(*plain, **(kwargs or {}))

    __torch_function__ = torch._C._disabled_torch_function_impl


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


def replace_raw_data(tensor: Float8Tensor, memory: torch.Tensor) -> None:
    memory.copy_(tensor._data)
    tensor._data = memory


def cast_master_weights_to_fp8(
    weights: list[Float8Tensor],
    main_weights: list[torch.Tensor | None],
    starts: list[int | None],
    group: Any,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Quantise each rank's range of the weights, with the scale of all of them."""
    assert manual_post_all_gather_processing
    for weight, main, start in zip(weights, main_weights, starts, strict=True):
        rounded = torch.zeros(1) if main is None else main.to(weight.dtype)
        largest = rounded.abs().max().float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        scale = scale_of(largest)
        weight._scale_inv.copy_(1 / scale)
        if main is not None:
            assert start is not None
            numbers, quantizer = weight._data.view(-1)[start : start + main.numel()], Float8Quantizer(scale)
            part = Float8Tensor(numbers, weight._scale_inv, weight.dtype, quantizer)
            quantizer.update_quantized(rounded, part)


def post_all_gather_processing(weights: list[Float8Tensor]) -> None:
    for weight in weights:
        weight._transpose = weight._data.t().contiguous()
