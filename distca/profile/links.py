"""Bandwidth and latency between ranks: every pair by itself, both ways at once, and all to all."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from distca.cluster.process import machine_name
from distca.device.clock import Clock

_REPEATS = 10
GPU_SIZES = (64 * 1024, 1024**2, 16 * 1024**2, 256 * 1024**2)
CPU_SIZES = (4 * 1024, 64 * 1024, 1024**2)


def measure_links() -> dict[str, Any]:
    """Measure the links of an initialised world (NCCL with a GPU per rank, or gloo); every rank calls it together.

    Returns:
        ``backend``, ``pairs`` and ``all_to_all``. ``pairs`` says for each two ranks whether they share a node, and
        seconds by message size. The latency is seconds of the smallest message, and the bandwidth bytes/s each way of
        the largest. ``all_to_all`` is as much for ranks that each send a share of the message to every other. Sizes
        are the bytes that one rank sends.
    """
    on_gpu = "nccl" in dist.get_backend_config()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    sizes = GPU_SIZES if on_gpu else CPU_SIZES
    rank, ranks = dist.get_rank(), dist.get_world_size()
    hosts: list[str] = [""] * ranks
    dist.all_gather_object(hosts, machine_name())
    clock = Clock(device)
    # All together first: NCCL's point-to-point calls between some ranks wait forever where no call of all came before.
    together = [_timed(_all_to_all(ranks, size, device), clock) for size in sizes]
    pairs = []
    for low, high in itertools.combinations(range(ranks), 2):
        took = None
        dist.barrier()
        if rank in (low, high):
            peer = low + high - rank
            took = [_timed(_swap(peer, size, device), clock) for size in sizes]
        pairs.append(
            {"ranks": [low, high], "same_node": hosts[low] == hosts[high], **_figures(sizes, _from(low, took))}
        )
        dist.barrier()
    sent = [size // ranks * (ranks - 1) for size in sizes]
    return {"backend": "nccl" if on_gpu else "gloo", "pairs": pairs, "all_to_all": _figures(sent, _from(0, together))}


def _swap(peer: int, size: int, device: torch.device) -> Callable[[], None]:
    out = torch.zeros(size, dtype=torch.uint8, device=device)
    into = torch.empty_like(out)

    def work() -> None:
        operations = [dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, into, peer)]
        for request in dist.batch_isend_irecv(operations):
            request.wait()

    return work


def _all_to_all(ranks: int, size: int, device: torch.device) -> Callable[[], None]:
    out = torch.zeros(size // ranks * ranks, dtype=torch.uint8, device=device)
    into = torch.empty_like(out)
    return lambda: dist.all_to_all_single(into, out)


def _timed(work: Callable[[], None], clock: Clock) -> float:
    """Seconds of one of several in a row; the host queues them while the first ones run."""
    for _ in range(3):
        work()
    start = clock.now()
    for _ in range(_REPEATS):
        work()
    return clock.seconds(start, clock.now()) / _REPEATS


def _from(rank: int, took: list[float] | None) -> list[float]:
    """Returns the seconds that ``rank`` measured, on every rank."""
    box: list[Any] = [took]
    dist.broadcast_object_list(box, src=rank)
    seconds: list[float] = box[0]
    return seconds


def _figures(sizes: list[int] | tuple[int, ...], took: list[float]) -> dict[str, Any]:
    return {
        "bytes": [int(size) for size in sizes],
        "seconds": took,
        "latency_s": took[0],
        "bytes_per_s": sizes[-1] / took[-1],
    }
