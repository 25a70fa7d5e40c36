"""Sums of rows in one pass and a fixed order: dot products of two tensors' rows, and sums over a row's experts.

A row is sent to K experts, and each such *pair* of a row and an expert gives an output row. N rows, D columns; P pairs,
R rows, K experts of a row, H columns.
"""

from __future__ import annotations

import torch

from distca.ops.cross_entropy import wide
from distca.ops.triton import has_kernels


def row_dots(a_ND: torch.Tensor, b_ND: torch.Tensor) -> torch.Tensor:
    """Returns the sum over d of a[..., d] · b[..., d], without autograd.

    Args:
        a_ND: [..., D], contiguous.
        b_ND: of the same shape and dtype, contiguous.

    Returns:
        [...] in at least float32, computed without rounding to a narrower dtype.
    """
    sums = a_ND.new_empty(a_ND.shape[:-1], dtype=wide(a_ND.dtype))
    if has_kernels(a_ND, "row sums"):
        from distca.ops.triton import row_sums as kernels

        kernels.row_dots(a_ND.flatten(0, -2), b_ND.flatten(0, -2), sums.flatten())
        return sums
    return torch.sum(a_ND.to(sums.dtype) * b_ND.to(sums.dtype), -1, out=sums)


def expert_sums(x_PH: torch.Tensor, pair_RK: torch.Tensor) -> torch.Tensor:
    """Returns for each row the sum of its pairs' outputs, without autograd.

    Args:
        x_PH: outputs of pairs, contiguous.
        pair_RK: int64 numbers of each row's pairs, contiguous; P or more stands for no pair.

    Returns:
        [R, H], added up in at least float32 and rounded once.
    """
    if has_kernels(x_PH, "expert sums"):
        from distca.ops.triton import row_sums as kernels

        out = x_PH.new_empty(len(pair_RK), x_PH.shape[1])
        kernels.expert_sums(x_PH, pair_RK, out)
        return out
    sums = x_PH.new_zeros(len(pair_RK), x_PH.shape[1], dtype=wide(x_PH.dtype))
    if not len(x_PH):
        return sums.to(x_PH.dtype)
    for pair_R in pair_RK.unbind(1):
        is_pair = pair_R < len(x_PH)
        each = x_PH[pair_R.clamp(max=len(x_PH) - 1)]
        sums += torch.where(is_pair[:, None], each, 0)
    return sums.to(x_PH.dtype)
