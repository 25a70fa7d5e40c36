"""Dot products of equal rows of two tensors, in one pass.

N rows, D columns.
"""

from __future__ import annotations

import torch

from distca.ops.cross_entropy import wide
from distca.ops.triton import has_kernels


def row_dots(a_ND: torch.Tensor, b_ND: torch.Tensor) -> torch.Tensor:
    """Σ_d a[..., d] · b[..., d].

    Args:
        a_ND: [..., D], contiguous.
        b_ND: of the same shape and dtype, contiguous.

    Returns:
        [...] in at least float32, never rounded to a narrower dtype in between. It has no gradient.
    """
    sums = a_ND.new_empty(a_ND.shape[:-1], dtype=wide(a_ND.dtype))
    if has_kernels(a_ND, "row sums"):
        from distca.ops.triton import row_dots as kernels

        kernels.row_dots(a_ND.flatten(0, -2), b_ND.flatten(0, -2), sums.flatten())
        return sums
    return torch.sum(a_ND.to(sums.dtype) * b_ND.to(sums.dtype), -1, out=sums)
