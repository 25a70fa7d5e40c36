"""Triton kernels of dot products of two tensors' rows, and of the sums of the outputs of a row's experts."""

import torch
import triton
import triton.language as tl

_ELEMENTS = 4096
"""Elements of each tensor that a program holds. It has as many whole rows as fit, and at least one."""
_BLOCK = 1024
"""The largest number of columns that a program of the sum over experts computes."""


def row_dots(a_ND: torch.Tensor, b_ND: torch.Tensor, sums_N: torch.Tensor) -> None:
    """Does what :func:`distca.ops.row_sums.row_dots` says, and writes to ``sums_N``, float32."""
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


def expert_sums(x_PH: torch.Tensor, pair_RK: torch.Tensor, out_RH: torch.Tensor) -> None:
    """Does what :func:`distca.ops.row_sums.expert_sums` says, and writes to ``out_RH``."""
    assert x_PH.is_contiguous() and pair_RK.is_contiguous() and out_RH.is_contiguous()
    rows, width = out_RH.shape
    if out_RH.numel():
        block = min(_BLOCK, triton.next_power_of_2(width))
        _expert_sums[(rows, triton.cdiv(width, block))](
            x_PH, pair_RK, out_RH, len(x_PH), width, K=pair_RK.shape[1], BLOCK=block, num_warps=4
        )


@triton.jit
def _expert_sums(x, pair, out, count, width, K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for expert in tl.static_range(K):
        number = tl.load(pair + row * K + expert)
        total += tl.load(x + number * width + column, mask=inside & (number < count), other=0.0).to(tl.float32)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=inside)
