"""Gathering, scattering and adding rows on one device: by the CUDA library where it is built, else by torch."""

from __future__ import annotations

import torch

from distca.transport import cuda_ops


def move_rows(
    source: torch.Tensor,
    source_rows: torch.Tensor | None,
    destination: torch.Tensor,
    destination_rows: torch.Tensor | None,
) -> None:
    """Does destination[destination_rows] = source[source_rows]; None stands for rows 0, 1, 2 and so on.

    Args:
        source: [N, ...] contiguous.
        source_rows: [rows] int64 on the same device, or None.
        destination: [M, ...] contiguous, same dtype and trailing shape.
        destination_rows: [rows] int64 on the same device, or None.
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
    """Adds to each destination row its copies among the packed rows: in float32, in packed order, rounded once.

    Args:
        packed: [N, ...] received rows.
        copies: [C] int64 packed rows, those of one destination row together.
        borders: [rows + 1] int64; copies[borders[i]:borders[i+1]] belong to destination row i.
        rounds: the same additions in the form that torch needs: in each round (packed rows, their places in
            ``destination_rows``), with no place twice.
        destination: [M, ...] rows to add to, same dtype and trailing shape.
        destination_rows: [rows] int64.
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
