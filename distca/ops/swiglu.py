"""SwiGLU in one pass forward and one backward.

N rows, F columns of the output; the input has 2F, first those of the gate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from distca.ops.cross_entropy import wide
from distca.ops.triton import has_kernels


def swiglu(x: torch.Tensor, factors: torch.Tensor | None = None) -> torch.Tensor:
    """silu(first half of the columns) × second half × the row's factor.

    Args:
        x: [..., 2F], contiguous.
        factors: [...] of the rows, contiguous, of any floating type; None for 1.

    Returns:
        [..., F], computed in at least float32 and rounded once.
    """
    out: torch.Tensor = _Swiglu.apply(x, factors)
    return out


def fill_swiglu(x: torch.Tensor, out: torch.Tensor, factors: torch.Tensor | None = None) -> None:
    """Write what :func:`swiglu` returns for ``x`` into ``out``, without autograd."""
    if has_kernels(x, "SwiGLU"):
        from distca.ops.triton import swiglu as kernels

        return kernels.swiglu(x.flatten(0, -2), out.flatten(0, -2), None if factors is None else factors.flatten())
    gate, up = x.to(wide(x.dtype)).chunk(2, dim=-1)
    value = torch.nn.functional.silu(gate) * up
    out.copy_(value if factors is None else value * factors[..., None])


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, factors)
        out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        fill_swiglu(x, out, factors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:  # type: ignore[override]
        x, factors = ctx.saved_tensors
        d_x, d_factors = torch.empty_like(x), None if factors is None else torch.empty_like(factors)
        if has_kernels(x, "SwiGLU"):
            from distca.ops.triton import swiglu as kernels

            given = d_out.contiguous().flatten(0, -2), x.flatten(0, -2)
            if factors is None:
                kernels.swiglu_backward(*given, d_x.flatten(0, -2))
            else:
                assert d_factors is not None
                kernels.scaled_swiglu_backward(*given, factors.flatten(), d_x.flatten(0, -2), d_factors.flatten())
            return d_x, d_factors
        gate, up = x.to(wide(x.dtype)).chunk(2, dim=-1)
        gradient, sigmoid = d_out.to(gate.dtype), gate.sigmoid()
        if factors is not None:
            d_factors = (gradient * gate * sigmoid * up).sum(-1).to(factors.dtype)
            gradient = gradient * factors[..., None]
        d_x[..., : gate.shape[-1]] = gradient * up * sigmoid * (1 + gate * (1 - sigmoid))
        d_x[..., gate.shape[-1] :] = gradient * gate * sigmoid
        return d_x, d_factors
