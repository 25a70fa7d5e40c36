"""Timing of exchanges, with two of them under way at a time as in the ping-pong order, and of what runs beside them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from distca.transport import Part, Transport
from distca.transport.native import row_bytes
from distca.transport.one_sided import OneSidedTransport


def median_seconds(launch: Callable[[], Any], repeats: int = 15, in_a_row: int = 8) -> float:
    """Seconds of one of several exchanges in a row, two of them under way at a time: median over repetitions of the
    largest over ranks. A sleeping kernel lets the host run ahead, as it does in training."""
    times = []
    for _ in range(repeats + 3):
        dist.barrier(device_ids=[torch.cuda.current_device()])
        torch.cuda._sleep(8_000_000)  # about 4 ms
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        under_way = launch()
        for _ in range(in_a_row - 1):
            following = launch()
            under_way.wait()
            under_way = following
        under_way.wait()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / in_a_row)
    return largest(statistics.median(times[3:]))


def wire_seconds(transport: Transport, part: Part, repeats: int = 15) -> float:
    """Seconds of the transfer alone."""
    if isinstance(transport, OneSidedTransport):
        return median_seconds(lambda: _Unplaced(transport, part), repeats)
    sent = part.source.index_select(0, part.moves.send_index)
    received = part.destination.new_empty((sum(part.moves.receive_counts), *part.destination.shape[1:]))
    counts = part.moves.receive_counts, part.moves.send_counts
    return median_seconds(lambda: dist.all_to_all_single(received, sent, *counts, async_op=True), repeats)


class _Unplaced:
    """A one-sided exchange up to the arrival of its rows, by the transport's own steps."""

    def __init__(self, transport: OneSidedTransport, part: Part) -> None:
        self._transport, self._counts = transport, part.moves.receive_counts
        self._landing = transport._ring.place((part.moves.most_received * row_bytes(part.source),))
        puts = transport._puts((part,), self._landing)
        self._token = transport._fabric.put(self._landing.number, self._landing.reuses, puts)

    def wait(self) -> None:
        fabric, number = self._transport._fabric, self._landing.number
        fabric.arrived(number, [peer for peer, rows in enumerate(self._counts) if rows])
        fabric.taken(self._transport._ring.taken(number))
        fabric.join(self._token)


def beside_ms(
    launch: Callable[[], Any], work: Callable[[], Any], repeats: int = 30, *, all_of_it: bool = False
) -> float:
    """Milliseconds of ``work`` beside what ``launch`` starts: median, the largest over ranks.

    Args:
        launch: starts a transfer, or does nothing.
        work: queues computation.
        repeats: how often.
        all_of_it: also count what the launch and its wait queue on the computation's stream.
    """
    times = []
    for _ in range(repeats + 5):
        dist.barrier(device_ids=[torch.cuda.current_device()])
        work()  # so that the host is ahead of the GPU when the transfer starts
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if all_of_it:
            start.record()
        handle = launch()
        if not all_of_it:
            start.record()
        work()
        if not all_of_it:
            end.record()
        if handle is not None:
            handle.wait()
        if all_of_it:
            end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return largest(statistics.median(times[5:]))


def largest(value: float) -> float:
    """The largest of all ranks' values."""
    box = torch.tensor(value, dtype=torch.float64, device="cuda")
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return float(box)
