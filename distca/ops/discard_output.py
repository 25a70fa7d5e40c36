"""Activations that are not kept for backward, because they are quickly computed again from what is kept anyway."""

from __future__ import annotations

from collections.abc import Callable

import torch


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
