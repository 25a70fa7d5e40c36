"""An elementwise function in plain torch that keeps nothing for backward but its input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Function = Callable[[torch.Tensor], torch.Tensor]


def recomputed(function: Function, x: torch.Tensor) -> torch.Tensor:
    """function(x), whose backward computes it again; can be differentiated once.

    Args:
        function: of one tensor, and of nothing else that needs a gradient.
        x: its input.
    """
    out: torch.Tensor = _Recomputed.apply(x, function)
    return out


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Function) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.function = function
        return function(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.function(x)
        return torch.autograd.grad(out, x, d_out)[0], None
