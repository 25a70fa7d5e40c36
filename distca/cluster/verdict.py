"""One verdict for all ranks, on what each of them found out by itself."""

from __future__ import annotations

import torch.distributed as dist


def first_objection(mine: str | None) -> str | None:
    """Returns the first objection of any rank, with its number, alike on all; None where no rank objects. Every
    rank calls it together. Without torch.distributed it is this process's own.

    Args:
        mine: this rank's objection, part of a sentence; None without one.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, objection in enumerate(everyone):
        if objection is not None:
            return f"on rank {rank}, {objection}" if rank else objection
    return None
