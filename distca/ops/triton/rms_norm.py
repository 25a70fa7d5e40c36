"""Triton kernels of RMSNorm, alone or together with the sum that is normalised.

Every row is read once in forward and once in backward. Rows of few columns have kernels of their own (narrow_norm.py).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from distca.ops.triton import narrow_norm

_ROWS_PER_PROGRAM = 64
"""Rows of a program in backward, which adds up its rows' part of the weight's gradient."""
_MOST_PROGRAMS = 2048
"""The largest number of programs in backward; with more rows than 131,072 each program has more than 64."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Does what :func:`distca.ops.rms_norm.rms_norm` says."""
    return _RMSNorm.apply(x, weight, epsilon)  # type: ignore[no-untyped-call,no-any-return]


def add_rms_norm(
    x: torch.Tensor, branch: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does what :func:`distca.ops.rms_norm.add_rms_norm` says."""
    return _AddRMSNorm.apply(x, branch, weight, epsilon)  # type: ignore[no-untyped-call,no-any-return]


def fill(x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> torch.Tensor:
    """Writes the norm of ``x`` to ``out``, both contiguous.

    Returns the factor of each row, 1 over the root of its mean square, in float32."""
    return _fill(x, None, x, weight, epsilon, out)


def _fill(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    total: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """Does the same with ``x`` + ``branch``, which is written to ``total``; without a branch only with ``x``."""
    assert x.is_contiguous() and out.is_contiguous() and (branch is None or branch.is_contiguous())
    columns = x.shape[-1]
    scale = torch.empty(x.numel() // columns, dtype=torch.float32, device=x.device)
    if len(scale) and branch is None and columns <= narrow_norm.MOST_COLUMNS:
        narrow_norm.fill(x, weight, epsilon, out, scale)
    elif len(scale):
        _forward[(len(scale),)](
            x,
            x if branch is None else branch,
            total,
            weight,
            out,
            scale,
            columns,
            epsilon,
            ADD=branch is not None,
            BLOCK=triton.next_power_of_2(columns),
            num_warps=8,
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
        return *_gradients(x, weight, scale, d_out, None), None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, branch: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.contiguous()
        out = torch.empty_like(x)
        total = x if branch is None else torch.empty_like(x)
        scale = _fill(x, None if branch is None else branch.contiguous(), total, weight, epsilon, out)
        ctx.has_branch = branch is not None
        # Autograd sets grad_fn on the returned tensor, so the kept one is detached from it.
        ctx.save_for_backward(total.detach(), weight, scale)
        return total.view_as(total), out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: torch.Tensor, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        total, weight, scale = ctx.saved_tensors
        d_x, d_weight = _gradients(total, weight, scale, d_out, d_total)
        return d_x, d_x if ctx.has_branch else None, d_weight, None


def _gradients(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, d_out: torch.Tensor, d_total: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of ``x``, with ``d_total`` added, and of the weight."""
    d_out, d_x, rows = d_out.contiguous(), torch.empty_like(x), len(scale)
    if rows and d_total is None and x.shape[-1] <= narrow_norm.MOST_COLUMNS:
        return d_x, narrow_norm.gradients(d_out, x, weight, scale, d_x).to(weight.dtype)
    programs = max(min(triton.cdiv(rows, _ROWS_PER_PROGRAM), _MOST_PROGRAMS), 1)
    # The programs' parts are added up in a fixed order, so the sum has the same bits every time.
    shares = torch.zeros(programs, x.shape[-1], dtype=torch.float32, device=x.device)
    if rows:
        _backward[(programs,)](
            d_out,
            d_out if d_total is None else d_total.contiguous(),
            x,
            weight,
            scale,
            d_x,
            shares,
            rows,
            x.shape[-1],
            triton.cdiv(rows, programs),
            programs,
            ADD=d_total is not None,
            BLOCK=triton.next_power_of_2(x.shape[-1]),
            num_warps=8,
        )
    return d_x, shares.sum(0).to(weight.dtype)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x, branch, total, weight, out, scale, columns, epsilon, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    values = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(branch + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * columns + column, rounded, mask=inside)
        values = rounded.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values, 0) / columns + epsilon)
    factors = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(scale + row, inverse)
    tl.store(out + row * columns + column, (values * inverse * factors).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    d_out,
    d_total,
    x,
    weight,
    scale,
    d_x,
    shares,
    rows,
    columns,
    steps,
    programs,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
        result = (scaled - normed * mean) * inverse
        if ADD:
            result += tl.load(d_total + place, mask=here, other=0.0).to(tl.float32)
        tl.store(d_x + place, result.to(d_x.dtype.element_ty), mask=here)
    tl.store(shares + program * columns + column, share, mask=inside)
