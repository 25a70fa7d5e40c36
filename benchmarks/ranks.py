"""One rank of a benchmark that torchrun started."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_patches.ranks.world import World


@contextmanager
def joined_world() -> Iterator[World]:
    """This process among the ranks, with its log; what packages warn of while they are imported stays unsaid."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron_patches.ranks.world import join_world, leave_world

        world = join_world()
    from distca.log import setup_logging

    setup_logging(world.rank)
    yield world
    leave_world()  # not after an error, when others may never leave
