"""Activations that are computed again in backward, and not kept until then."""

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


def forget_until_backward(out: torch.Tensor, fill: Callable[[torch.Tensor], None], used: torch.Tensor) -> None:
    """Free the memory of ``out`` until the gradient of ``used`` is there, and compute it again then.

    Args:
        out: a tensor with memory of its own, whose users are done and need it again only in backward.
        fill: writes the same numbers into it, without autograd.
        used: the output of what used ``out``, all of it; where it needs no gradient nothing is done.
    """
    if not used.requires_grad:
        return
    size = out.untyped_storage().nbytes()
    out.untyped_storage().resize_(0)
    # Emptied when it was used: hooks live as long as the loss does, and would keep the tensors until then.
    forgotten = [(out, fill)]

    def restore(_: torch.Tensor) -> None:
        while forgotten:
            again, refill = forgotten.pop()
            again.untyped_storage().resize_(size)
            with torch.no_grad():
                # .data: autograd counts changes of saved tensors, and this one restores what was saved.
                refill(again.data)

    used.register_hook(restore)
