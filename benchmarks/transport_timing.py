"""Timing of exchanges, with two of them under way at a time as in the ping-pong order, and of what runs beside them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from distca.transport import Part, Transport
from distca.transport.cuda_ops import row_bytes
from distca.transport.nvshmem.transport import Landing, OneSidedTransport

FEW, MANY = 8, 200
_RUN_S, _RATE = 0.010, 300e9  # how long exchanges in a row should last, at about what a rank sends in a second
# A GPU's clock makes at most about 2 million cycles in a millisecond; a host that takes its time queues an exchange in
# 0.6 ms.
_SLEEP_CYCLES, _SLEEP_CYCLES_PER_EXCHANGE = 8_000_000, 1_500_000


@dataclass(frozen=True)
class Timed:
    """Time of an exchange.

    Attributes:
        seconds: of one of several in a row: median over repetitions, the largest over ranks.
        in_a_row: how many they were.
        host_ahead: whether every rank's host had queued all of them before the first one began, each time; else the
            time may be that of the host.
    """

    seconds: float
    in_a_row: int
    host_ahead: bool


def in_a_row_for(sent: float) -> int:
    """How many exchanges, in which a rank sends so many bytes, last 10 ms or longer; 8 to 200."""
    return min(max(math.ceil(_RUN_S * _RATE / max(sent, 1)), FEW), MANY)


def steady(launch: Callable[[], Any], sent: float) -> Timed:
    """Time of an exchange among so many that links and clocks that rested before count little.

    Where the host does not get ahead of that many, because a GPU takes only so much queued work, it is half as many.

    Args:
        launch: starts an exchange.
        sent: bytes that a rank sends in it; the same on all ranks.
    """
    number = in_a_row_for(sent)
    _run(launch, FEW)
    while number > FEW:
        _run(launch, number)  # may still be held up by memory that is allocated
        if _run(launch, number)[1]:
            break
        number = max(number // 2, FEW)
    return timed(launch, 7, number)


def timed(launch: Callable[[], Any], repeats: int = 15, in_a_row: int = FEW) -> Timed:
    """Time of an exchange among so many in a row, after a pause: some milliseconds in which nothing travels."""
    runs = [_run(launch, in_a_row) for _ in range(repeats + 2)][2:]
    return Timed(largest(statistics.median(seconds for seconds, _ in runs)), in_a_row, all(ahead for _, ahead in runs))


def _run(launch: Callable[[], Any], in_a_row: int) -> tuple[float, bool]:
    """Seconds of an exchange on this rank, and whether all ranks' hosts were ahead of their GPUs, as in training: a
    sleeping kernel lets them get there."""
    dist.barrier(device_ids=[torch.cuda.current_device()])
    torch.cuda._sleep(max(_SLEEP_CYCLES, _SLEEP_CYCLES_PER_EXCHANGE * in_a_row))
    # GPUs sleep for different times, as their clocks and hosts differ. Who is early must not count the others' rest.
    dist.all_reduce(torch.zeros(1, device="cuda"))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    under_way = launch()
    for _ in range(in_a_row - 1):
        following = launch()
        under_way.wait()
        under_way = following
    under_way.wait()
    end.record()
    late = start.query()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / in_a_row, largest(float(late)) == 0


def wire(transport: Transport, part: Part) -> Callable[[], Any]:
    """Returns a function that starts the transfer of a part's rows alone."""
    if isinstance(transport, OneSidedTransport):
        return lambda: _Unplaced(transport, part)
    sent = part.source.index_select(0, part.moves.send_index)
    received = part.destination.new_empty((sum(part.moves.receive_counts), *part.destination.shape[1:]))
    counts = part.moves.receive_counts, part.moves.send_counts
    return lambda: dist.all_to_all_single(received, sent, *counts, async_op=True)


class _Unplaced:
    """A one-sided exchange up to the arrival of its rows, by the transport's own steps."""

    def __init__(self, transport: OneSidedTransport, part: Part) -> None:
        self._transport = transport
        place = transport._ring.place((part.moves.most_received * row_bytes(part.source),))
        self._landing = Landing(place.number, place.reuses, (part,), [place.begin])
        self._token = transport._put(self._landing)

    def wait(self) -> None:
        fabric, landing = self._transport._fabric, self._landing
        fabric.arrived(landing.number, landing.senders)
        fabric.consumed(self._transport._ring.consumed(landing.number))
        fabric.join(self._token)


def beside_ms(launch: Callable[[], Any], work: Callable[[], Any]) -> float:
    """Milliseconds of ``work`` beside what ``launch`` starts: median, the largest over ranks.

    Args:
        launch: starts a transfer, or does nothing.
        work: queues computation.
    """
    times = []
    for _ in range(35):
        dist.barrier(device_ids=[torch.cuda.current_device()])
        work()  # so that the host is ahead of the GPU when the transfer starts
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        handle = launch()
        start.record()
        work()
        end.record()
        if handle is not None:
            handle.wait()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return largest(statistics.median(times[5:]))


def largest(value: float) -> float:
    """The largest of all ranks' values."""
    box = torch.tensor(value, dtype=torch.float64, device="cuda")
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return float(box)
