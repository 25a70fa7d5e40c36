"""The ranks of a start, with Megatron-Core as its modes need it: with this project's changes, or as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.throughput.settings import Settings

if TYPE_CHECKING:
    from distca.cluster.world import World


def join_ranks(settings: Settings) -> World:
    """Join the ranks that torchrun or srun started; every rank calls it."""
    if settings.peer:
        from benchmarks.peers.world import join_unmodified

        return join_unmodified()
    from megatron_patches.ranks.world import join_world

    return join_world()


def leave_ranks() -> None:
    """Undo :func:`join_ranks`."""
    import torch.distributed as dist

    dist.destroy_process_group()
