"""Conditions of FP8 products on a model's sizes and rows, for training and for simulated steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

Fp8 = Literal["none", "current", "delayed", "blockwise"]
"""How tensors are scaled to FP8: by their own largest value, by those of the steps before, or in blocks."""

_ROWS, _COLUMNS, _GATHERED_COLUMNS = 32, 16, 128


def rows_multiple(fp8: Fp8, shares: int) -> int:
    """Returns the number of which the rows of a nano-batch on a rank are a multiple.

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
) -> Iterator[str]:
    """Widths of the linear layers on one tensor-parallel rank that FP8 products cannot take.

    Args:
        fp8: how tensors are scaled.
        hidden, ffn, heads, kv_heads, head_dim: the model's.
        tp: tensor-parallel size.
        shared: sequence parallelism.

    Returns:
        A sentence on each.
    """
    if fp8 == "none":
        return
    widths = {
        "the hidden size": hidden,
        "a tensor-parallel rank's part of the queries, keys and values": (heads + 2 * kv_heads) * head_dim // tp,
        "a tensor-parallel rank's part of the heads": heads * head_dim // tp,
        "a tensor-parallel rank's part of the MLP": ffn // tp,
    }
    for name, width in widths.items():
        # Rows that are gathered over tensor-parallel ranks travel in whole blocks.
        gathered = fp8 == "blockwise" and shared and name == "the hidden size"
        multiple = _GATHERED_COLUMNS if gathered else _COLUMNS
        if width % multiple:
            yield (
                f"`fp8` is {fp8}, but {name} is {width}, which is not a multiple of {multiple}; change the model's "
                "sizes or `tp`, or set `fp8` to none."
            )
