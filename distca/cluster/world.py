"""This process's place among the ranks, and how they meet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from distca.cluster.environment import Launched
from distca.cluster.health import Health
from distca.cluster.interface import LOOPBACK, bind_gloo, on_one_node
from distca.cluster.store import own_store
from distca.cluster.timeout import TIMEOUT


@dataclass(frozen=True)
class World:
    """The place of this process in the run.

    Attributes:
        rank: global rank.
        size: number of ranks.
        device: this rank's device.
        health: watches over the other ranks; None where nobody does.
    """

    rank: int
    size: int
    device: torch.device
    health: Health | None = None


def initialize(told: Launched, backend: str, device: torch.device | None = None) -> None:
    """Start torch.distributed as the launcher says.

    Args:
        told: by the launcher.
        backend: of torch.distributed.
        device: this rank's GPU; None on CPUs.
    """
    bind_gloo(LOOPBACK if on_one_node(told.size) else told.address)
    store = own_store(told.rank, told.size, told.address, told.port, TIMEOUT)
    dist.init_process_group(
        backend, store=store, rank=told.rank, world_size=told.size, timeout=TIMEOUT, device_id=device
    )
