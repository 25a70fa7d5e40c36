"""The linear layer of a router with float32 logits, as products of bfloat16 matrices.

Megatron multiplies float32 copies of rows and weights, without tensor cores. A product of two bfloat16 numbers is exact
in float32, so logits lose nothing. The gradient of a logit is float32. It is split into two bfloat16 numbers, whose sum
has 16 of its 24 bits.

N rows, H hidden, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from distca.ops.cross_entropy import wide
from distca.ops.triton import has_kernels


def is_faster(x_NH: torch.Tensor, weight_EH: torch.Tensor) -> bool:
    """Whether :func:`router_linear` computes these tensors on tensor cores, and its check did not refuse it."""
    narrow = x_NH.dtype == weight_EH.dtype == torch.bfloat16
    return narrow and x_NH.numel() > 0 and _is_served() and has_kernels(x_NH, "router products")


def router_linear(x_NH: torch.Tensor, weight_EH: torch.Tensor) -> torch.Tensor:
    """Returns [N, E] logits in at least float32: rows times the transposed weight. It can be differentiated once.

    Args:
        x_NH: rows.
        weight_EH: weight, in the dtype of rows.
    """
    logits: torch.Tensor = _RouterLinear.apply(x_NH, weight_EH)
    return logits


class _RouterLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NH: torch.Tensor, weight_EH: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_NH, weight_EH)
        return _wide_product(x_NH, weight_EH.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x_NH, weight_EH = ctx.saved_tensors
        d_N2E = d_NE.new_empty(len(d_NE), 2, d_NE.shape[1], dtype=x_NH.dtype)
        d_N2E[:, 0] = d_NE
        d_N2E[:, 1] = d_NE - d_N2E[:, 0]
        parts = d_N2E.flatten(1)
        d_x_NH = parts @ torch.cat((weight_EH, weight_EH))
        d_weight_2EH = _wide_product(parts.t(), x_NH).view(2, *weight_EH.shape)
        return d_x_NH, d_weight_2EH.sum(0).to(weight_EH.dtype)


def _wide_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of two matrices in at least float32."""
    dtype = wide(a.dtype)
    if a.is_cuda and a.dtype != dtype and _is_served():
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a.to(dtype), b.to(dtype))


def _is_served() -> bool:
    """Whether torch multiplies narrow matrices to wide ones: from 2.8 on."""
    return "dtype" in torch.ops.aten.mm.overloads()
