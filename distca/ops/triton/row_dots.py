"""A Triton kernel of dot products of equal rows of two tensors."""

import torch
import triton
import triton.language as tl

_ELEMENTS = 4096
"""Elements of each tensor that a program holds at a time; it takes as many whole rows as fit, and at least one."""


def row_dots(a_ND: torch.Tensor, b_ND: torch.Tensor, sums_N: torch.Tensor) -> None:
    """See :func:`distca.ops.row_dots.row_dots`; writes into ``sums_N``, float32."""
    assert a_ND.is_contiguous() and b_ND.is_contiguous() and sums_N.is_contiguous()
    rows, columns = a_ND.shape
    width = triton.next_power_of_2(columns)
    most = max(1, _ELEMENTS // width)
    if rows:
        _row_dots[(triton.cdiv(rows, most),)](a_ND, b_ND, sums_N, rows, columns, ROWS=most, WIDTH=width, num_warps=4)


@triton.jit
def _row_dots(a, b, sums, rows, columns, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    first = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + row, tl.sum(first * second, 1), mask=row < rows)
