"""Triton kernels of SwiGLU and similar gates (:class:`distca.ops.gate.Gate`), and of their gradients, in one pass each.

An output may also be multiplied by a factor of its row.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from distca.ops.gate import Gate

_BLOCK = 2048
"""The largest number of columns that a program holds at a time."""


def swiglu(x_NF2: torch.Tensor, out_NF: torch.Tensor, factors_N: torch.Tensor | None, gate: Gate) -> None:
    """Does what :func:`distca.ops.swiglu.swiglu` says, and writes to ``out_NF``."""
    assert x_NF2.is_contiguous() and out_NF.is_contiguous() and (factors_N is None or factors_N.is_contiguous())
    rows, width = out_NF.shape
    if out_NF.numel():
        grid = (rows, triton.cdiv(width, _block(width)))
        _forward[grid](x_NF2, out_NF, factors_N, width, SCALED=factors_N is not None, **_constants(width, gate))


def swiglu_backward(d_out_NF: torch.Tensor, x_NF2: torch.Tensor, d_x_NF2: torch.Tensor, gate: Gate) -> None:
    """Writes the gradient of ``x_NF2`` to ``d_x_NF2``."""
    assert d_out_NF.is_contiguous() and x_NF2.is_contiguous() and d_x_NF2.is_contiguous()
    rows, width = d_out_NF.shape
    if d_out_NF.numel():
        grid = (rows, triton.cdiv(width, _block(width)))
        _backward[grid](d_out_NF, x_NF2, d_x_NF2, width, **_constants(width, gate))


def scaled_swiglu_backward(
    d_out_NF: torch.Tensor,
    x_NF2: torch.Tensor,
    factors_N: torch.Tensor,
    d_x_NF2: torch.Tensor,
    d_factors_N: torch.Tensor,
    gate: Gate,
) -> None:
    """Writes the gradients of ``x_NF2`` and ``factors_N`` to ``d_x_NF2`` and ``d_factors_N``."""
    assert d_out_NF.is_contiguous() and x_NF2.is_contiguous() and d_x_NF2.is_contiguous()
    assert factors_N.is_contiguous() and d_factors_N.is_contiguous()
    rows, width = d_out_NF.shape
    if d_out_NF.numel():
        _scaled_backward[(rows,)](d_out_NF, x_NF2, factors_N, d_x_NF2, d_factors_N, width, **_constants(width, gate))


def _block(width: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(width))


def _constants(width: int, gate: Gate) -> dict[str, Any]:
    """The arguments for which the kernels are compiled."""
    of_gate = {"SLOPE": gate.slope, "OFFSET": gate.offset, "LIMIT": gate.limit}
    return {**of_gate, "BLOCK": _block(width), "num_warps": 4}


@triton.jit
def _limited(gate, up, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both, clamped to the limit; nan stays nan."""
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, up)
        up = tl.where(up < -LIMIT, -LIMIT, up)
    return gate, up


@triton.jit
def _gradients(gradient, gate, up, SLOPE: tl.constexpr, OFFSET: tl.constexpr, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The output, and the gradients of the gate and of the gated number."""
    limited, through = _limited(gate, up, LIMIT)
    sigmoid = tl.sigmoid(SLOPE * limited)
    silu = limited * sigmoid
    through += OFFSET
    d_gate = gradient * through * (sigmoid + SLOPE * silu * (1.0 - sigmoid))
    d_up = gradient * silu
    if LIMIT > 0:
        d_gate = tl.where(gate <= LIMIT, d_gate, 0.0)
        d_up = tl.where((up <= LIMIT) & (up >= -LIMIT), d_up, 0.0)
    return silu * through, d_gate, d_up


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x,
    out,
    factors,
    width,
    SCALED: tl.constexpr,
    SLOPE: tl.constexpr,
    OFFSET: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    first = x + row * 2 * width + column
    gate = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(first + width, mask=inside, other=0.0).to(tl.float32)
    gate, up = _limited(gate, up, LIMIT)
    value = gate * tl.sigmoid(SLOPE * gate) * (up + OFFSET)
    if SCALED:
        value *= tl.load(factors + row).to(tl.float32)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    d_out,
    x,
    d_x,
    width,
    SLOPE: tl.constexpr,
    OFFSET: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    first = row * 2 * width + column
    gate = tl.load(x + first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + first + width, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(d_out + row * width + column, mask=inside, other=0.0).to(tl.float32)
    _, d_gate, d_up = _gradients(gradient, gate, up, SLOPE, OFFSET, LIMIT)
    tl.store(d_x + first, d_gate.to(d_x.dtype.element_ty), mask=inside)
    tl.store(d_x + first + width, d_up.to(d_x.dtype.element_ty), mask=inside)


@triton.jit
def _scaled_backward(  # type: ignore[no-untyped-def]
    d_out,
    x,
    factors,
    d_x,
    d_factors,
    width,
    SLOPE: tl.constexpr,
    OFFSET: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factors + row).to(tl.float32)
    products = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < width
        first = row * 2 * width + column
        gate = tl.load(x + first, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + first + width, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(d_out + row * width + column, mask=inside, other=0.0).to(tl.float32)
        value, d_gate, d_up = _gradients(gradient * factor, gate, up, SLOPE, OFFSET, LIMIT)
        products += gradient * value
        tl.store(d_x + first, d_gate.to(d_x.dtype.element_ty), mask=inside)
        tl.store(d_x + first + width, d_up.to(d_x.dtype.element_ty), mask=inside)
    tl.store(d_factors + row, tl.sum(products, 0).to(d_factors.dtype.element_ty))
