"""Activations that are not kept until backward, which computes them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Function = Callable[[torch.Tensor], torch.Tensor]


def recomputed(function: Function, x: torch.Tensor) -> torch.Tensor:
    """Returns function(x), whose backward computes the function again; can be differentiated once.

    Args:
        function: a function of one tensor. It must use no other tensor that needs a gradient.
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
    """Frees the memory of ``out``, and computes it again when backward reaches ``used``.

    Args:
        out: a tensor with a storage of its own. The operation that read it has run, and needs it again in backward.
        fill: writes the same numbers into the tensor that it gets, without autograd.
        used: the output of the operation that read ``out``. If it needs no gradient, nothing is done.
    """
    if not used.requires_grad:
        return
    size = out.untyped_storage().nbytes()
    out.untyped_storage().resize_(0)
    # The hook empties this list. Hooks live as long as the graph, and would keep the tensors alive so long.
    forgotten = [(out, fill)]

    def restore(_: torch.Tensor) -> None:
        while forgotten:
            again, refill = forgotten.pop()
            again.untyped_storage().resize_(size)
            with torch.no_grad():
                # .data hides the write from autograd, which refuses saved tensors that were changed.
                refill(again.data)

    used.register_hook(restore)
