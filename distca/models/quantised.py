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
PARTS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "mxfp4": {BLOCKS: ("U8",), SCALES: ("U8",)},
    "fp8": {"": ("F8_E4M3",), FACTORS: ("F32", "BF16", "F16")},
}
"""The ends of the names of a tensor's parts in the files, and the types that each may have; by kind."""
FP8_BLOCK: Final = 128
"""Rows of a block, and its columns."""
_SHARING = 32
"""Numbers of MXFP4 that share a scale."""
_BIAS = 127
"""The bias of the exponents of scales."""
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of four bits, without their sign, which is the highest bit."""


def part_shapes(kind: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]] | None:
    """The shapes of the parts of a tensor, by the ends of their names; None where no tensor of its shape is read so.

    Of MXFP4 these are projections of experts, [experts, columns, rows], whose last two dimensions change places while
    they are read. Matrices of FP8 that lie in one tensor have factors of their own.
    """
    if kind == "mxfp4":
        if len(shape) != 3 or shape[1] % _SHARING:
            return None
        experts, columns, rows = shape
        scales = (experts, rows, columns // _SHARING)
        return {BLOCKS: (*scales, _SHARING // 2), SCALES: scales}
    if len(shape) < 2:
        return None
    *before, rows, columns = shape
    return {"": shape, FACTORS: (*before, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))}


def mxfp4_values(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[columns, rows] in bfloat16, which has all these numbers.

    Args:
        blocks: [rows, groups, 16] uint8.
        scales: [rows, groups] uint8.
    """
    import torch

    numbers = torch.tensor([*_FP4, *(-each for each in _FP4)])
    both_of_a_byte = torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), dim=1)
    values = both_of_a_byte.index_select(0, blocks.flatten().int()).view(*scales.shape, _SHARING)
    values *= torch.ldexp(torch.ones(scales.shape), scales.int() - _BIAS)[..., None]
    return values.to(torch.bfloat16).flatten(-2).t()


def fp8_values(part: Any, factors: Any, number: int | None, ranges: tuple[slice, ...]) -> torch.Tensor:
    """Rows and columns of a matrix in bfloat16; factors are applied in float32.

    Args:
        part: [rows, columns], or several of them, which is sliced.
        factors: of its blocks, which are sliced.
        number: of the matrix, where there are several.
        ranges: of rows, then of columns; those that are left out are whole.
    """
    import torch

    piece = () if number is None else (number,)
    whole = (*ranges, slice(None), slice(None))[:2]
    picked = factors[(*piece, slice(None), slice(None))].float()
    for dim, (size, each) in enumerate(zip(part.get_shape()[-2:], whole, strict=True)):
        picked = picked.index_select(dim, torch.arange(size)[each] // FP8_BLOCK)
    return (part[(*piece, *whole)].float() * picked).to(torch.bfloat16)
