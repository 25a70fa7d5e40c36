"""Gathers, scatters and adds rows of tensors on one device, by the CUDA library of ``csrc/`` or by torch."""

from __future__ import annotations

import torch

from distca.transport import cuda_ops


def move_rows(
    source: torch.Tensor,
    source_rows: torch.Tensor | None,
    destination: torch.Tensor,
    destination_rows: torch.Tensor | None,
) -> None:
    """Sets destination[destination_rows] = source[source_rows].

    Args:
        source: [N, ...] contiguous.
        source_rows: [rows] int64 on the device of ``source``; None means 0, 1, 2 and so on.
        destination: [M, ...] contiguous, with the dtype and trailing shape of ``source``.
        destination_rows: [rows] int64 on the device of ``source``; None means 0, 1, 2 and so on.
    """
    index = source_rows if source_rows is not None else destination_rows
    rows = len(index) if index is not None else len(source)
    if rows == 0:
        return
    if source.is_cuda and cuda_ops.is_available():
        cuda_ops.move_rows(source, source_rows, destination, destination_rows, rows)
        return
    picked = source[:rows] if source_rows is None else source.index_select(0, source_rows)
    if destination_rows is None:
        destination[:rows].copy_(picked)
    else:
        destination.index_copy_(0, destination_rows, picked)


def sum_rows(
    packed: torch.Tensor,
    copies: torch.Tensor,
    borders: torch.Tensor,
    rounds: list[tuple[torch.Tensor, torch.Tensor]],
    destination: torch.Tensor,
    destination_rows: torch.Tensor,
) -> None:
    """Adds packed rows to destination rows. Sums are float32 (float64 for float64 rows) and rounded once, at the end.

    Example: packed rows 0 and 2 are added to destination row 5, and packed row 1 to row 9. Then destination_rows is
    [5, 9], copies is [0, 2, 1] and borders is [0, 2, 3]; rounds is [([0, 1], [0, 1]), ([2], [0])].

    Args:
        packed: [N, ...] rows to add.
        copies: [C] int64 indices of packed rows, grouped by destination row, and added in this order.
        borders: [rows + 1] int64; copies[borders[i]:borders[i+1]] are added to row destination_rows[i].
        rounds: the same additions in the form that torch needs, for rows that the CUDA library does not add. A round is
            a pair: indices of packed rows, and for each the index i in destination_rows. A round has each i at most
            once, so the order of additions is fixed.
        destination: [M, ...] rows to add to, with the dtype and trailing shape of ``packed``.
        destination_rows: [rows] int64 indices of rows of ``destination``, without repetition.
    """
    if not len(destination_rows):
        return
    if packed.is_cuda and cuda_ops.is_available() and cuda_ops.can_sum(packed):
        cuda_ops.sum_rows(packed, copies, borders, destination, destination_rows)
        return
    wide = torch.promote_types(destination.dtype, torch.float32)
    total = destination.index_select(0, destination_rows).to(wide)
    for rows, place in rounds:
        total.index_add_(0, place, packed.index_select(0, rows).to(wide))
    destination.index_copy_(0, destination_rows, total.to(destination.dtype))
