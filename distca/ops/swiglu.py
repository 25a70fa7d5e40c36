"""SwiGLU in one pass forward and one backward.

N rows, F columns of the output; the input has 2F, first those of the gate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from distca.ops.cross_entropy import wide
from distca.ops.triton import has_kernels


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(first half of the columns) × second half.

    Args:
        x: [..., 2F], contiguous.

    Returns:
        [..., F], computed in at least float32 and rounded once.
    """
    out: torch.Tensor = _Swiglu.apply(x)  # type: ignore[no-untyped-call]
    return out


def fill_swiglu(x: torch.Tensor, out: torch.Tensor) -> None:
    """Write what :func:`swiglu` returns for ``x`` into ``out``, without autograd."""
    if has_kernels(x, "SwiGLU"):
        from distca.ops.triton import swiglu as kernels

        return kernels.swiglu(x.flatten(0, -2), out.flatten(0, -2))
    gate, up = x.to(wide(x.dtype)).chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        fill_swiglu(x, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        d_x = torch.empty_like(x)
        if has_kernels(x, "SwiGLU"):
            from distca.ops.triton import swiglu as kernels

            kernels.swiglu_backward(d_out.contiguous().flatten(0, -2), x.flatten(0, -2), d_x.flatten(0, -2))
            return d_x
        gate, up = x.to(wide(x.dtype)).chunk(2, dim=-1)
        gradient, sigmoid = d_out.to(gate.dtype), gate.sigmoid()
        d_x[..., : gate.shape[-1]] = gradient * up * sigmoid * (1 + gate * (1 - sigmoid))
        d_x[..., gate.shape[-1] :] = gradient * gate * sigmoid
        return d_x
