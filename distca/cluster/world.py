"""Initialises torch.distributed, and holds this process's place among the ranks."""

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
        rank: this process's global rank.
        size: number of ranks.
        device: this rank's device.
        health: the watch over the other ranks; None without one.
    """

    rank: int
    size: int
    device: torch.device
    health: Health | None = None


def initialize(told: Launched, backend: str, device: torch.device | None = None) -> None:
    """Initialises torch.distributed.

    Args:
        told: this process's place, from the launcher's variables.
        backend: torch.distributed's backend, such as "gloo".
        device: this rank's GPU; None on CPUs.
    """
    bind_gloo(LOOPBACK if on_one_node(told.size) else told.address)
    store = own_store(told.rank, told.size, told.address, told.port, TIMEOUT)
    dist.init_process_group(
        backend, store=store, rank=told.rank, world_size=told.size, timeout=TIMEOUT, device_id=device
    )
