"""Limiting links to what a network would give, and measuring what they give."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from distca.profile.served import median_seconds
from distca.runtime.clock import Clock

_BYTES = 256 << 20
_CPU_BYTES = 1 << 20


def limit_links(channels: int) -> None:
    """Limit NCCL, before it is started: a channel copies with one multiprocessor, at some 20 GB/s over NVLink.

    The same library then moves the rows, keys and values and gradients of every mode over the same slow links. NVLink's
    multicast, which only some collectives can use, is off.
    """
    os.environ.update(
        NCCL_MAX_NCHANNELS=str(channels),
        NCCL_MIN_NCHANNELS="1",
        NCCL_MAX_P2P_NCHANNELS=str(channels),
        NCCL_MIN_P2P_NCHANNELS="1",
        NCCL_NVLS_ENABLE="0",
    )


def measure_links(group: dist.ProcessGroup, device: torch.device) -> dict[str, float]:
    """GB/s that each rank of ``group`` sends in an all-to-all, and receives in an all-gather, of large messages."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return {}
    share = (_BYTES if device.type == "cuda" else _CPU_BYTES) // ranks
    sent = torch.zeros(ranks * share, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    works = {
        "all_to_all_gb_per_s": lambda: dist.all_to_all_single(received, sent, group=group),
        "all_gather_gb_per_s": lambda: dist.all_gather_into_tensor(received, sent[:share], group=group),
    }
    clock, rates = Clock(device), {}
    for name, work in works.items():
        for _ in range(3):
            work()
        rates[name] = (ranks - 1) * share / median_seconds(work, clock, 5) / 1e9
    return rates
