"""Triton kernels of RMSNorm: every row is read once forward and once backward."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

_ROWS_PER_PROGRAM = 64  # backward: each program adds up its rows' share of the weight's gradient
_MOST_PROGRAMS = 2048


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """See :func:`distca.ops.rms_norm.rms_norm`."""
    return _RMSNorm.apply(x, weight, epsilon)  # type: ignore[no-untyped-call,no-any-return]


def fill(x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> torch.Tensor:
    """Write the norm of ``x`` into ``out``, both contiguous; returns what every row was multiplied by, float32."""
    assert x.is_contiguous() and out.is_contiguous()
    columns = x.shape[-1]
    scale = torch.empty(x.numel() // columns, dtype=torch.float32, device=x.device)
    if len(scale):
        _forward[(len(scale),)](
            x, weight, out, scale, columns, epsilon, BLOCK=triton.next_power_of_2(columns), num_warps=8
        )
    return scale


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        scale = fill(x, weight, epsilon, out)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        d_out, d_x, rows = d_out.contiguous(), torch.empty_like(x), len(scale)
        programs = max(min(triton.cdiv(rows, _ROWS_PER_PROGRAM), _MOST_PROGRAMS), 1)
        # Added up in a fixed order: the same bits every time.
        shares = torch.zeros(programs, x.shape[-1], dtype=torch.float32, device=x.device)
        if rows:
            _backward[(programs,)](
                d_out,
                x,
                weight,
                scale,
                d_x,
                shares,
                rows,
                x.shape[-1],
                triton.cdiv(rows, programs),
                programs,
                BLOCK=triton.next_power_of_2(x.shape[-1]),
                num_warps=8,
            )
        return d_x, shares.sum(0).to(weight.dtype), None


@triton.jit
def _forward(x, weight, out, scale, columns, epsilon, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    values = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values, 0) / columns + epsilon)
    factors = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(scale + row, inverse)
    tl.store(out + row * columns + column, (values * inverse * factors).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(d_out, x, weight, scale, d_x, shares, rows, columns, steps, programs, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    factors = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.zeros((BLOCK,), tl.float32)
    for step in range(0, steps):
        row = program + step * programs
        here = inside & (row < rows)
        place = row * columns + column
        gradient = tl.load(d_out + place, mask=here, other=0.0).to(tl.float32)
        inverse = tl.load(scale + row, mask=row < rows, other=0.0)
        normed = tl.load(x + place, mask=here, other=0.0).to(tl.float32) * inverse
        share += gradient * normed
        scaled = gradient * factors
        mean = tl.sum(scaled * normed, 0) / columns
        tl.store(d_x + place, ((scaled - normed * mean) * inverse).to(d_x.dtype.element_ty), mask=here)
    tl.store(shares + program * columns + column, share, mask=inside)
