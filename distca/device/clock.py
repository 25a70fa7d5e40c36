"""Times on a GPU's stream or on the host, read without stopping either."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from distca.device.event import Event


@dataclass(frozen=True)
class Instant:
    """A moment: a host time in seconds, or an event on a CUDA stream that becomes one later."""

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
        """Like :meth:`now`, but to time work between two instants: on CPUs in CPU seconds of this thread, because ranks
        that share cores wait for each other. The process's CPU seconds would also count the threads that move rows and
        that plan the next step. If an operation runs in several threads, this one's part stands for all of them;
        torchrun gives each rank one. Not to be compared with other instants."""
        return self.now() if self.on_gpu else Instant(time.thread_time())

    def synchronize(self) -> None:
        """Set the common zero of all ranks; blocks until they are all here."""
        if self.on_gpu:
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()
        self._base = self.now()
        if self._base.event is not None:
            self._base.event.synchronize()

    def seconds(self, start: Instant, end: Instant) -> float:
        """Seconds between two instants; blocks until both have come."""
        if start.event is None or end.event is None:
            return end.host - start.host
        end.event.synchronize()
        return start.event.elapsed_time(end.event) / 1e3

    def since_zero(self, instant: Instant) -> float:
        """Seconds since the common zero of all ranks."""
        assert self._base is not None
        return self.seconds(self._base, instant)
