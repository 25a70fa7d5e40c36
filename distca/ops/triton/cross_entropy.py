"""Triton kernels of the cross-entropy: one reads the logits once, the other turns them into their gradient in place."""

import torch
import triton
import triton.language as tl

_BLOCK = 8192
"""The largest number of logits that a program holds at a time."""


def row_statistics(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Does what :func:`distca.ops.cross_entropy.row_statistics` says."""
    rows, columns = logits_NV.shape
    figures = torch.empty(3, rows, dtype=torch.float32, device=logits_NV.device)
    if rows:
        _statistics[(rows,)](
            logits_NV, targets_N, figures, rows, columns, logits_NV.stride(0), BLOCK=_block(columns), num_warps=8
        )
    return figures[0], figures[1], figures[2]


def logits_to_gradient_(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, lse_N: torch.Tensor, weights_N: torch.Tensor
) -> None:
    """Does what :func:`distca.ops.cross_entropy.logits_to_gradient_` says."""
    rows, columns = logits_NV.shape
    block = _block(columns)
    if rows:
        _gradient[(rows, triton.cdiv(columns, block))](
            logits_NV, targets_N, lse_N, weights_N, columns, logits_NV.stride(0), BLOCK=block, num_warps=8
        )


def _block(columns: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(columns))


@triton.jit
def _statistics(logits, targets, figures, rows, columns, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    offsets = tl.arange(0, BLOCK)
    maximum = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for begin in range(0, columns, BLOCK):
        inside = begin + offsets < columns
        x = tl.load(start + begin + offsets, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(maximum, tl.max(x, 0))
        total = total * tl.exp(maximum - higher) + tl.sum(tl.exp(x - higher), 0)
        maximum = higher
    target = tl.load(targets + row)
    here = (target >= 0) & (target < columns)
    tl.store(figures + row, maximum)
    tl.store(figures + rows + row, total)
    tl.store(figures + 2 * rows + row, tl.load(start + target, mask=here, other=0.0).to(tl.float32))


@triton.jit
def _gradient(logits, targets, lse, weights, columns, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    place = logits + row * stride + column
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    probability = tl.exp(x - tl.load(lse + row))
    gradient = tl.where(column == tl.load(targets + row), probability - 1.0, probability) * tl.load(weights + row)
    tl.store(place, gradient.to(logits.dtype.element_ty), mask=inside)
