"""Quantised weights of folders as numbers that can be trained.

MXFP4 (gpt-oss): 32 numbers in a row share a power of two; a byte has two of them, the first in its lower half. FP8
(DeepSeek-V3): blocks of 128 x 128 numbers share a factor. Formats: Open Compute Project, Microscaling Formats 1.0, and
the technical report of DeepSeek-V3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

BLOCKS, SCALES, FACTORS = "_blocks", "_scales", "_scale_inv"
"""The ends of the names of MXFP4's two tensors, and of FP8's factors."""
FP8_BLOCK: Final = 128
"""Rows of a block, and its columns."""
_SHARING = 32
"""Numbers of MXFP4 that share a scale."""
_BIAS = 127
"""The bias of the exponents of scales."""
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of four bits, without their sign, which is the highest bit."""


def mxfp4_shape(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor, whose last two dimensions change places while it is read, by that of its blocks."""
    *before, rows, groups, _ = blocks
    return *before, groups * _SHARING, rows


def mxfp4_values(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[columns, rows] in bfloat16, which has all these numbers.

    Args:
        blocks: [rows, groups, 16] uint8.
        scales: [rows, groups] uint8.
    """
    import torch

    numbers = torch.tensor([*_FP4, *(-each for each in _FP4)], dtype=torch.bfloat16)
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).int()
    return torch.ldexp(numbers[halves], scales.int()[..., None] - _BIAS).to(torch.bfloat16).flatten(-2).t()


def fp8_values(part: Any, factors: Any, ranges: tuple[slice, ...]) -> torch.Tensor:
    """Rows and columns of a matrix in bfloat16; factors are applied in float32.

    Args:
        part: [rows, columns], which is sliced.
        factors: of its blocks, which are sliced.
        ranges: of rows, then of columns; those that are left out are whole.
    """
    import torch

    whole = (*ranges, slice(None), slice(None))[:2]
    picked = factors[:].float()
    for dim, (size, each) in enumerate(zip(part.get_shape(), whole, strict=True)):
        picked = picked.index_select(dim, torch.arange(size)[each] // FP8_BLOCK)
    return (part[whole].float() * picked).to(torch.bfloat16)
