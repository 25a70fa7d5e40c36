"""The activation of MLPs, SwiGLU and similar gates (gate.py), in one pass forward and one backward.

N rows, F columns of the output. The input has 2F columns: first those of the gate, then the gated ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from distca.ops.cross_entropy import wide
from distca.ops.gate import SWIGLU, Gate
from distca.ops.triton import has_kernels


def swiglu(x: torch.Tensor, factors: torch.Tensor | None = None, gate: Gate = SWIGLU) -> torch.Tensor:
    """Returns the gate's function of both halves of the columns, times each row's factor.

    Args:
        x: [..., 2F].
        factors: [...] factor on each row's output, of any floating dtype; None for 1.
        gate: the function.

    Returns:
        [..., F], computed in at least float32 and rounded once.
    """
    out: torch.Tensor = _Swiglu.apply(x, factors, gate)
    return out


def fill_swiglu(x: torch.Tensor, out: torch.Tensor, factors: torch.Tensor | None = None, gate: Gate = SWIGLU) -> None:
    """Writes the result of :func:`swiglu` to ``out``, without autograd. All tensors are contiguous."""
    if has_kernels(x, "SwiGLU"):
        from distca.ops.triton import swiglu as kernels

        factors = None if factors is None else factors.flatten()
        return kernels.swiglu(x.flatten(0, -2), out.flatten(0, -2), factors, gate)
    g, u = _limited(x, gate)
    value = g * torch.sigmoid(gate.slope * g) * (u + gate.offset)
    out.copy_(value if factors is None else value * factors[..., None])


def _limited(x: torch.Tensor, gate: Gate) -> tuple[torch.Tensor, torch.Tensor]:
    """The gate's half g and the gated half u, in at least float32, clamped to the gate's limit."""
    g, u = x.to(wide(x.dtype)).chunk(2, dim=-1)
    return (g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit)) if gate.limit else (g, u)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factors: torch.Tensor | None, gate: Gate) -> torch.Tensor:
        # Backward writes gradients of the same strides through flat views, and others would flatten to copies.
        x, factors = x.contiguous(), None if factors is None else factors.contiguous()
        ctx.save_for_backward(x, factors)
        ctx.gate = gate
        out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        fill_swiglu(x, out, factors, gate)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:  # type: ignore[override]
        x, factors = ctx.saved_tensors
        gate: Gate = ctx.gate
        d_x, d_factors = torch.empty_like(x), None if factors is None else torch.empty_like(factors)
        if has_kernels(x, "SwiGLU"):
            from distca.ops.triton import swiglu as kernels

            given = d_out.contiguous().flatten(0, -2), x.flatten(0, -2)
            if factors is None:
                kernels.swiglu_backward(*given, d_x.flatten(0, -2), gate)
            else:
                assert d_factors is not None
                kernels.scaled_swiglu_backward(*given, factors.flatten(), d_x.flatten(0, -2), d_factors.flatten(), gate)
            return d_x, d_factors, None
        g, u = _limited(x, gate)
        gradient, sigmoid, up = d_out.to(g.dtype), torch.sigmoid(gate.slope * g), u + gate.offset
        if factors is not None:
            d_factors = (gradient * g * sigmoid * up).sum(-1).to(factors.dtype)
            gradient = gradient * factors[..., None]
        d_g = gradient * up * sigmoid * (1 + gate.slope * g * (1 - sigmoid))
        d_u = gradient * g * sigmoid
        if gate.limit:  # Clamped numbers have no gradient.
            given_g, given_u = x.chunk(2, dim=-1)
            d_g = d_g * (given_g <= gate.limit)
            d_u = d_u * (given_u.abs() <= gate.limit)
        d_x[..., : g.shape[-1]], d_x[..., g.shape[-1] :] = d_g, d_u
        return d_x, d_factors, None
