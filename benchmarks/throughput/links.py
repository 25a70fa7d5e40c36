"""Limiting links to what a network would give, and measuring what they give."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from distca.device.clock import Clock
from distca.profile.timing import median_seconds

_BYTES = 256 << 20
_CPU_BYTES = 8 << 20


def limit_links(channels: int) -> None:
    """Limit NCCL, before it is started: a channel copies with one multiprocessor, at some 20 GB/s over NVLink.

    The same library then moves the rows, keys and values and gradients of every mode over the same slow links.
    Collectives (all-gather, reduce-scatter) take NCCL_MAX_NCHANNELS channels at most. Sends and receives (all-to-all,
    rings) take NCCL_MAX_P2P_NCHANNELS for all peers of a rank together, rounded up to a power of two. NVLink's
    multicast, which only some collectives can use, is off. A process reads these variables once.

    Args:
        channels: a power of two.
    """
    os.environ.update(
        NCCL_MAX_NCHANNELS=str(channels),
        NCCL_MIN_NCHANNELS="1",
        NCCL_MAX_P2P_NCHANNELS=str(channels),
        NCCL_MIN_P2P_NCHANNELS="1",
        NCCL_NVLS_ENABLE="0",
    )


def measure_links(group: dist.ProcessGroup, device: torch.device) -> dict[str, float]:
    """GB/s that each rank of ``group`` sends in an all-to-all and to its neighbour in a ring, and receives in an
    all-gather, of large messages: what DistCA and Ulysses, ring attention and per-document context parallelism use."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if ranks == 1:
        return {}
    share = (_BYTES if device.type == "cuda" else _CPU_BYTES) // ranks
    sent = torch.zeros(ranks * share, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    names = dist.get_process_group_ranks(group)
    following, previous = names[(rank + 1) % ranks], names[rank - 1]

    def pass_on() -> None:
        hop = [
            dist.P2POp(dist.isend, sent, following, group),
            dist.P2POp(dist.irecv, received, previous, group),
        ]
        for work in dist.batch_isend_irecv(hop):
            work.wait()

    works: dict[str, tuple[Callable[[], object], int]] = {
        "all_to_all_gb_per_s": (lambda: dist.all_to_all_single(received, sent, group=group), (ranks - 1) * share),
        "all_gather_gb_per_s": (
            lambda: dist.all_gather_into_tensor(received, sent[:share], group=group),
            (ranks - 1) * share,
        ),
        "ring_gb_per_s": (pass_on, ranks * share),
    }
    clock, rates = Clock(device), {}
    for name, (work, size) in works.items():
        for _ in range(3):
            work()
        rates[name] = size / median_seconds(work, clock, 5) / 1e9
    return rates
