"""Measures times on a GPU's stream, or on the host for CPU ranks, without making the one wait for the other."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from distca.device.event import Event


@dataclass(frozen=True)
class Instant:
    """A moment.

    Attributes:
        host: the host's time in seconds when the instant was taken.
        event: on a GPU, the event in the stream that comes at this moment; None on CPUs.
    """

    host: float
    event: Event | None = None


class Clock:
    """Takes instants on the current stream of a CUDA device, or on the host for CPU tensors."""

    def __init__(self, device: torch.device | str) -> None:
        self.on_gpu = torch.device(device).type == "cuda"
        self._base: Instant | None = None

    def now(self) -> Instant:
        """The current moment; on a GPU, the moment at which the work queued so far is done."""
        if not self.on_gpu:
            return Instant(time.perf_counter())
        event = Event(timed=True)
        event.record()
        return Instant(time.perf_counter(), event)

    def work(self) -> Instant:
        """Like :meth:`now`, for measuring work between two instants of this method.

        On CPUs it counts CPU seconds of this thread, because ranks that share cores wait for each other. CPU seconds of
        the process would include threads that move rows or plan the next step. An operation may run in several
        threads; then only this thread's part is counted. torchrun gives each rank one thread by default."""
        return self.now() if self.on_gpu else Instant(time.thread_time())

    def synchronize(self) -> None:
        """Makes this moment time zero on all ranks; waits until all ranks have called it."""
        if self.on_gpu:
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()
        self._base = self.now()
        if self._base.event is not None:
            self._base.event.synchronize()

    def seconds(self, start: Instant, end: Instant) -> float:
        """Returns the seconds between two instants; waits until both have come."""
        if start.event is None or end.event is None:
            return end.host - start.host
        end.event.synchronize()
        return start.event.elapsed_time(end.event) / 1e3

    def since_zero(self, instant: Instant) -> float:
        """Returns the seconds from the last :meth:`synchronize` to an instant."""
        assert self._base is not None
        return self.seconds(self._base, instant)
