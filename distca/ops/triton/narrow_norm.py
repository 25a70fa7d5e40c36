"""Triton kernels of RMSNorm for rows of few columns, such as heads. A program computes several rows at a time.

With one row of 128 columns in a program, most threads would have nothing to do.
"""

import torch
import triton
import triton.language as tl

MOST_COLUMNS = 512
"""The most columns of a row for these kernels."""
_ELEMENTS = 4096
"""Elements of a tensor that a program holds. It has as many whole rows as fit."""
_MOST_PROGRAMS = 2048
"""The largest number of programs in backward. Each adds up its rows' part of the weight's gradient."""


def fill(x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor, scale: torch.Tensor) -> None:
    """Writes the norm of ``x`` to ``out``, and the factor of each row to ``scale``, float32; all are contiguous."""
    rows, columns = len(scale), x.shape[-1]
    block = triton.next_power_of_2(columns)
    together = _ELEMENTS // block
    _forward[(triton.cdiv(rows, together),)](
        x, weight, out, scale, rows, columns, epsilon, ROWS=together, BLOCK=block, num_warps=8
    )


def gradients(
    d_out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, d_x: torch.Tensor
) -> torch.Tensor:
    """Writes the gradients of ``x`` to ``d_x``; returns those of the weight in float32. All tensors are contiguous."""
    rows, columns = len(scale), x.shape[-1]
    block = triton.next_power_of_2(columns)
    together = _ELEMENTS // block
    tiles = triton.cdiv(rows, together)
    programs = min(tiles, _MOST_PROGRAMS)
    # The programs' parts are added up in a fixed order, so the sum has the same bits every time.
    shares = torch.empty(programs, columns, dtype=torch.float32, device=x.device)
    _backward[(programs,)](
        *(d_out, x, weight, scale, d_x, shares, rows, columns, triton.cdiv(tiles, programs), programs),
        ROWS=together,
        BLOCK=block,
        num_warps=8,
    )
    return shares.sum(0)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x, weight, out, scale, rows, columns, epsilon, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values, 1) / columns + epsilon)
    factors = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(scale + row, inverse, mask=row < rows)
    normed = values * inverse[:, None] * factors[None, :]
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    d_out, x, weight, scale, d_x, shares, rows, columns, steps, programs, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    factors = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    share = tl.zeros((ROWS, BLOCK), tl.float32)
    for step in range(0, steps):
        row = (program + step * programs) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        place = row[:, None] * columns + column[None, :]
        gradient = tl.load(d_out + place, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(scale + row, mask=row < rows, other=0.0)[:, None]
        normed = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * inverse
        share += gradient * normed
        scaled = gradient * factors
        mean = tl.sum(scaled * normed, 1)[:, None] / columns
        tl.store(d_x + place, ((scaled - normed * mean) * inverse).to(d_x.dtype.element_ty), mask=inside)
    tl.store(shares + program * columns + column, tl.sum(share, 0), mask=column < columns)
