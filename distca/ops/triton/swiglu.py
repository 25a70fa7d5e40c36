"""Triton kernels of SwiGLU: silu(first half) × second half, times a factor of its row where there are some, and its
gradients, in one pass each."""

import torch
import triton
import triton.language as tl

_BLOCK = 2048


def swiglu(x_NF2: torch.Tensor, out_NF: torch.Tensor, factors_N: torch.Tensor | None = None) -> None:
    """See :func:`distca.ops.swiglu.swiglu`; writes into ``out_NF``."""
    assert x_NF2.is_contiguous() and out_NF.is_contiguous() and (factors_N is None or factors_N.is_contiguous())
    rows, width = out_NF.shape
    if out_NF.numel():
        _forward[(rows, triton.cdiv(width, _block(width)))](
            x_NF2, out_NF, factors_N, width, SCALED=factors_N is not None, BLOCK=_block(width), num_warps=4
        )


def swiglu_backward(d_out_NF: torch.Tensor, x_NF2: torch.Tensor, d_x_NF2: torch.Tensor) -> None:
    """Gradient with regard to ``x_NF2``, into ``d_x_NF2``."""
    assert d_out_NF.is_contiguous() and x_NF2.is_contiguous() and d_x_NF2.is_contiguous()
    rows, width = d_out_NF.shape
    if d_out_NF.numel():
        grid = (rows, triton.cdiv(width, _block(width)))
        _backward[grid](d_out_NF, x_NF2, d_x_NF2, width, BLOCK=_block(width), num_warps=4)


def scaled_swiglu_backward(
    d_out_NF: torch.Tensor,
    x_NF2: torch.Tensor,
    factors_N: torch.Tensor,
    d_x_NF2: torch.Tensor,
    d_factors_N: torch.Tensor,
) -> None:
    """Gradients with regard to ``x_NF2`` and ``factors_N``, into ``d_x_NF2`` and ``d_factors_N``."""
    assert d_out_NF.is_contiguous() and x_NF2.is_contiguous() and d_x_NF2.is_contiguous()
    assert factors_N.is_contiguous() and d_factors_N.is_contiguous()
    rows, width = d_out_NF.shape
    if d_out_NF.numel():
        _scaled_backward[(rows,)](
            d_out_NF, x_NF2, factors_N, d_x_NF2, d_factors_N, width, BLOCK=_block(width), num_warps=4
        )


def _block(width: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(width))


@triton.jit
def _forward(x, out, factors, width, SCALED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    first = x + row * 2 * width + column
    gate = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(first + width, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    if SCALED:
        value *= tl.load(factors + row).to(tl.float32)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(d_out, x, d_x, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    first = row * 2 * width + column
    gate = tl.load(x + first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + first + width, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(d_out + row * width + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = gradient * up * (sigmoid + silu * (1.0 - sigmoid))
    tl.store(d_x + first, d_gate.to(d_x.dtype.element_ty), mask=inside)
    tl.store(d_x + first + width, (gradient * silu).to(d_x.dtype.element_ty), mask=inside)


@triton.jit
def _scaled_backward(d_out, x, factors, d_x, d_factors, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
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
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        products += gradient * silu * up
        gradient *= factor
        d_gate = gradient * up * (sigmoid + silu * (1.0 - sigmoid))
        tl.store(d_x + first, d_gate.to(d_x.dtype.element_ty), mask=inside)
        tl.store(d_x + first + width, (gradient * silu).to(d_x.dtype.element_ty), mask=inside)
    tl.store(d_factors + row, tl.sum(products, 0).to(d_factors.dtype.element_ty))
