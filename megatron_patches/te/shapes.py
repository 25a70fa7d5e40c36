"""What FP8 products want of the sizes of a model and of its rows. Knows settings as numbers; needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

Fp8 = Literal["none", "current", "delayed", "blockwise"]
"""How tensors are scaled to FP8: by their own largest value, by those of the steps before, or in blocks."""

_ROWS, _COLUMNS, _GATHERED_COLUMNS = 32, 16, 128


def rows_multiple(fp8: Fp8, shares: int) -> int:
    """What the rows of a nano-batch on a rank are a multiple of.

    FP8 products take multiples of 16. Transformer Engine's tuned kernel that converts and transposes takes multiples of
    32; the one for other sizes takes 1.6 times as long (benchmarks/results/one_gpu_linears_traced.json).

    Args:
        fp8: how tensors are scaled.
        shares: tensor-parallel ranks that share the rows; 1 without sequence parallelism.
    """
    if fp8 == "none":
        return shares
    return shares * (_GATHERED_COLUMNS if fp8 == "blockwise" and shares > 1 else _ROWS)


def unfit_widths(
    fp8: Fp8, *, hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int, tp: int, shared: bool
) -> Iterator[tuple[str, int, int]]:
    """Widths of the linear layers on one tensor-parallel rank that FP8 products cannot take.

    Args:
        fp8: how tensors are scaled.
        hidden, ffn, heads, kv_heads, head_dim: the model's.
        tp: tensor-parallel size.
        shared: sequence parallelism.

    Returns:
        What the width is of, in words; the width; what it has to be a multiple of.
    """
    if fp8 == "none":
        return
    gathered = _GATHERED_COLUMNS if fp8 == "blockwise" and shared else _COLUMNS
    widths = {
        "a tensor-parallel rank's part of the queries, keys and values": (heads + 2 * kv_heads) * head_dim // tp,
        "a tensor-parallel rank's part of the heads": heads * head_dim // tp,
        "a tensor-parallel rank's part of the MLP": ffn // tp,
    }
    # Rows that are gathered over tensor-parallel ranks travel in whole blocks.
    if hidden % gathered:
        yield "the hidden size", hidden, gathered
    for name, width in widths.items():
        if width % _COLUMNS:
            yield name, width, _COLUMNS
