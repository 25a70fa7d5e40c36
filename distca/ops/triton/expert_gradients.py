"""Triton kernel of the gradients of all experts' weights, added to their main gradients in one launch.

One product for each expert takes the GPU less time than the host needs to queue it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_OUTPUTS, _INPUTS, _ROWS = 128, 256, 64
"""Rows and columns of a weight that a program computes, and rows of operands that it adds up at a time. The numbers
are those of usual products on Hopper; others were not tried."""
_WIDTH = 8
"""The columns of operands are a multiple of it, so that 16 bytes are read at once. If the kernel did not know, it would
read bfloat16 numbers one by one."""


def add_expert_gradients(sums_EOI: torch.Tensor, d_PO: torch.Tensor, x_PI: torch.Tensor, ends_E: torch.Tensor) -> None:
    """Adds d_PO[rows of e].T @ x_PI[rows of e] to sums_EOI[e], for each expert e.

    Products are added up in float32. Experts without rows keep their sums.

    Args:
        sums_EOI: float32 [E, O, I]; each of its matrices is contiguous, at a distance that is a multiple of 8.
        d_PO: gradients of outputs, contiguous, rows sorted by expert.
        x_PI: inputs, contiguous, of the same dtype. O and I are multiples of 8.
        ends_E: int32 one past the last row of each expert.
    """
    experts, outputs, inputs = sums_EOI.shape
    assert d_PO.is_contiguous() and x_PI.is_contiguous() and sums_EOI.stride()[1:] == (inputs, 1)
    widths = outputs, inputs, sums_EOI.stride(0)
    assert not any(each % _WIDTH for each in widths)
    # Tiles of one expert run at the same time, so that they find its rows in the cache.
    grid = (triton.cdiv(outputs, _OUTPUTS) * triton.cdiv(inputs, _INPUTS), experts)
    _add_gradients[grid](
        *(sums_EOI, d_PO, x_PI, ends_E, *(each // _WIDTH for each in widths)),
        WIDTH=_WIDTH,
        O_BLOCK=_OUTPUTS,
        I_BLOCK=_INPUTS,
        R_BLOCK=_ROWS,
        num_warps=8,
        num_stages=3,
    )


# One version of the kernel serves all sizes, so that the self-check runs the version that training does.
@triton.jit(do_not_specialize=["outputs", "inputs", "distance"])
def _add_gradients(  # type: ignore[no-untyped-def]
    sums, d_of, x_of, ends, outputs, inputs, distance,
    WIDTH: tl.constexpr, O_BLOCK: tl.constexpr, I_BLOCK: tl.constexpr, R_BLOCK: tl.constexpr,
):  # fmt: skip
    outputs, inputs, distance = outputs * WIDTH, inputs * WIDTH, distance * WIDTH
    tile, expert = tl.program_id(0), tl.program_id(1).to(tl.int64)
    across = tl.cdiv(inputs, I_BLOCK)
    output = (tile // across) * O_BLOCK + tl.arange(0, O_BLOCK)
    column = (tile % across) * I_BLOCK + tl.arange(0, I_BLOCK)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    if begin < end:
        total = tl.zeros((O_BLOCK, I_BLOCK), tl.float32)
        row = tl.arange(0, R_BLOCK)[:, None]
        d_place, x_place = row * outputs + output[None, :], row * inputs + column[None, :]
        is_output, is_column = (output < outputs)[None, :], (column < inputs)[None, :]
        d_at, x_at = d_of + begin.to(tl.int64) * outputs, x_of + begin.to(tl.int64) * inputs
        for left in range(end - begin, 0, -R_BLOCK):
            d = tl.load(d_at + d_place, mask=(row < left) & is_output, other=0.0)
            x = tl.load(x_at + x_place, mask=(row < left) & is_column, other=0.0)
            total = tl.dot(tl.trans(d), x, total, input_precision="ieee")
            d_at += R_BLOCK * outputs
            x_at += R_BLOCK * inputs
        place = sums + expert * distance + output[:, None].to(tl.int64) * inputs + column[None, :]
        inside = (output < outputs)[:, None] & is_column
        tl.store(place, tl.load(place, mask=inside, other=0.0) + total, mask=inside)
