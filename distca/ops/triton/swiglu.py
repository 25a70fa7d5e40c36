"""Triton kernels of SwiGLU: silu(first half) × second half, and its gradient, in one pass each."""

import torch
import triton
import triton.language as tl

_BLOCK = 2048


def swiglu(x_NF2: torch.Tensor, out_NF: torch.Tensor) -> None:
    """See :func:`distca.ops.swiglu.swiglu`; writes into ``out_NF``."""
    assert x_NF2.is_contiguous() and out_NF.is_contiguous()
    rows, width = out_NF.shape
    if out_NF.numel():
        _forward[(rows, triton.cdiv(width, _block(width)))](x_NF2, out_NF, width, BLOCK=_block(width), num_warps=4)


def swiglu_backward(d_out_NF: torch.Tensor, x_NF2: torch.Tensor, d_x_NF2: torch.Tensor) -> None:
    """Gradient with regard to ``x_NF2``, into ``d_x_NF2``."""
    assert d_out_NF.is_contiguous() and x_NF2.is_contiguous() and d_x_NF2.is_contiguous()
    rows, width = d_out_NF.shape
    if d_out_NF.numel():
        grid = (rows, triton.cdiv(width, _block(width)))
        _backward[grid](d_out_NF, x_NF2, d_x_NF2, width, BLOCK=_block(width), num_warps=4)


def _block(width: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(width))


@triton.jit
def _forward(x, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    first = x + row * 2 * width + column
    gate = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(first + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


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
