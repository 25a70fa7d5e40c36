"""Triton kernel of the gradients of all experts' biases: each is a sum of rows, and one launch computes all.

One sum for each expert takes the GPU less time than the host needs to queue it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS, _ROWS = 128, 32
"""Columns of a program, and rows that it reads at a time."""
_PARTS = 8
"""Programs that share the rows of an expert, so that one expert with most rows keeps more of the GPU busy."""


def expert_row_sums(x_PO: torch.Tensor, scale_P: torch.Tensor | None, ends_E: torch.Tensor) -> torch.Tensor:
    """Returns float32 [E, O], for each expert the sum of its rows; rows are sorted by expert.

    Args:
        x_PO: rows, contiguous.
        scale_P: a factor on each row, contiguous; None for 1.
        ends_E: int32 one past the last row of each expert.
    """
    assert x_PO.is_contiguous() and (scale_P is None or scale_P.is_contiguous())
    experts, columns = len(ends_E), x_PO.shape[1]
    sums = x_PO.new_empty(_PARTS, experts, columns, dtype=torch.float32)
    _row_sums[(triton.cdiv(columns, _COLUMNS), experts, _PARTS)](
        *(x_PO, x_PO if scale_P is None else scale_P, ends_E, sums, columns),
        SCALED=scale_P is not None,
        PARTS=_PARTS,
        ROWS=_ROWS,
        BLOCK=_COLUMNS,
        num_warps=4,
    )
    return sums.sum(0)


@triton.jit
def _row_sums(  # type: ignore[no-untyped-def]
    x, scale, ends, sums, columns,
    SCALED: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert, part = tl.program_id(1), tl.program_id(2)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    inside = column < columns
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(begin + part * ROWS, end, PARTS * ROWS):
        row = first + tl.arange(0, ROWS)
        at = row[:, None].to(tl.int64) * columns + column[None, :]
        values = tl.load(x + at, mask=(row < end)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        if SCALED:
            values *= tl.load(scale + row, mask=row < end, other=0.0).to(tl.float32)[:, None]
        total += values
    place = sums + (part * tl.num_programs(1) + expert).to(tl.int64) * columns + column
    tl.store(place, tl.sum(total, 0), mask=inside)
