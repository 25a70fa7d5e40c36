"""The times of a rank's compute and transfers for both nano-batches, for the timeline and for tests of the order.

Recording costs two events per span. While it is off only the time of serving is measured, which the step log compares
over ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from distca.device.clock import Clock, Instant
from distca.transport import Handle
from distca.transport.breakable import BreakableHandle
from distca.transport.collective import CollectiveHandle
from distca.words import NANO_NAMES


@dataclass
class _Span:
    track: str
    name: str
    start: Instant
    end: Instant | None = None
    args: Mapping[str, Any] | None = None


class Timeline:
    """The spans of one rank.

    Attributes:
        zero: the host's clock, in seconds since 1970, where recorded times are 0.
        times_waits: whether :meth:`waiting` times its block.
        order: while recording, the actions in the order in which the host queued them. An entry has action, layer,
            nano-batch and direction: "launch q,k,v 3 ping forward".
    """

    def __init__(self, device: torch.device | str) -> None:
        self.clock = Clock(device)
        self.recording, self.zero, self._began = False, 0.0, 0.0
        self.times_waits = False
        self.order: list[str] = []
        self._spans: list[_Span] = []
        self._serves: dict[str, list[tuple[Instant, Instant]]] = {"forward": [], "backward": []}
        self._waits: dict[str, list[tuple[Instant, Instant]]] = {}
        self._open: _Span | None = None
        self._reopen: tuple[str, int, int, str] | None = None
        self._side_stream: torch.cuda.Stream | None = None

    def start_recording(self, zero: float | None = None) -> None:
        """Records from now on, from a zero of time that all ranks share; every rank calls it.

        Args:
            zero: the zero that ranks of another world took, as servers without a model do with their homes'; None takes
                this moment.
        """
        self.clock.synchronize()
        self._began = time.time()
        self.zero = self._began if zero is None else zero
        self.order.clear()
        self.recording = True

    @contextmanager
    def compute(self, name: str, layer: int, nano: int, direction: str, kinds: str = "") -> Iterator[None]:
        """Times the work queued inside the block; ``kinds`` of attention layers stand behind the span's name."""
        if not self.recording:
            yield
            return
        self.close()
        self.order.append(_entry(name, layer, nano, direction))
        shown = f"{name} {layer} {direction}" + f", {kinds}" * bool(kinds)
        span = _Span(f"compute {NANO_NAMES[nano]}", shown, self.clock.now())
        self._spans.append(span)
        yield
        span.end = self.clock.now()

    @contextmanager
    def serve(self, layer: int, nano: int, direction: str, kinds: str = "") -> Iterator[None]:
        """Times the attention server, also while nothing is recorded, for :meth:`serve_seconds`; ``kinds`` of layers as
        in :meth:`compute`."""
        with self.compute("serve", layer, nano, direction, kinds):
            start = self.clock.work()
            yield
            self._serves[direction].append((start, self.clock.work()))

    @contextmanager
    def stage(self, name: str, track: str = "stage") -> Iterator[None]:
        """Times a part of the step other than a layer, on a track of its own, or a whole step on the track ``steps``.

        Layers' spans may lie inside."""
        if not self.recording:
            yield
            return
        span = _Span(track, name, self.clock.now())
        self._spans.append(span)
        yield
        span.end = self.clock.now()

    def open(self, name: str, layer: int, nano: int, direction: str, *, past_launches: bool = False) -> None:
        """Begins a span that ends at the next :meth:`close` or at the next span.

        Unless it goes on ``past_launches``, it also ends when a transfer is launched."""
        if self.recording:
            self.close()
            self.order.append(_entry(name, layer, nano, direction))
            self._open = _Span(f"compute {NANO_NAMES[nano]}", f"{name} {layer} {direction}", self.clock.now())
            self._spans.append(self._open)
            self._reopen = (name, layer, nano, direction) if past_launches else None

    def close(self) -> None:
        """Ends the span that :meth:`open` began, if there is one."""
        if self._open is not None:
            self._open.end = self.clock.now()
            self._open = self._reopen = None

    def launched(
        self,
        what: str,
        handle: Handle,
        layer: int,
        nano: int,
        direction: str,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """Notes a transfer that was just launched, and when its collectives of both hops end; ``args`` are shown with
        it.

        Each nano-batch has a track for each sort of transfer, so transfers of a track do not overlap."""
        if not self.recording:
            return
        goes_on = self._reopen
        self.close()
        self.order.append(_entry(f"launch {what}", layer, nano, direction))
        track = f"transfers {NANO_NAMES[nano]} {what} {direction}"
        span = _Span(track, f"{what} {layer} {direction}", self.clock.now(), args=args)
        works = getattr(handle, "works", [])
        if works:
            self._spans.append(span)
            if self.clock.on_gpu:
                self._end_on_side_stream(span, works)
            elif isinstance(handle, CollectiveHandle | BreakableHandle):
                handle.tell(lambda: setattr(span, "end", self.clock.now()))
        if goes_on:
            self.open(*goes_on, past_launches=True)

    def joined(self, what: str, layer: int, nano: int, direction: str) -> None:
        """Notes that a transfer is about to be waited for."""
        if self.recording:
            self.close()
            self.order.append(_entry(f"join {what}", layer, nano, direction))

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Times how long compute waits for a transfer, and for the copies that then put rows in their places."""
        if not self.times_waits:
            yield
            return
        start = self.clock.now()
        yield
        self._waits.setdefault(what, []).append((start, self.clock.now()))

    def take_waits(self) -> dict[str, float]:
        """Returns the seconds that compute waited since the last call, by transfer; blocks until the last wait ends."""
        waits, self._waits = self._waits, {}
        return {what: sum(self.clock.seconds(*each) for each in spans) for what, spans in waits.items()}

    def take_serves(self) -> dict[str, list[float]]:
        """Returns by direction the seconds of each time that this rank served since the last call, in order; blocks
        until the last one ends."""
        seconds = {
            direction: [self.clock.seconds(start, end) for start, end in spans]
            for direction, spans in self._serves.items()
        }
        self._serves = {"forward": [], "backward": []}
        return seconds

    def serve_seconds(self) -> dict[str, float]:
        """Returns by direction the seconds that this rank served since the last call; blocks as :meth:`take_serves`."""
        return {direction: sum(seconds) for direction, seconds in self.take_serves().items()}

    def take(self, rank: int) -> list[dict[str, Any]]:
        """Ends recording and returns its spans as {rank, track, name, start_us, duration_us}, transfers also with
        args."""
        self.close()
        self.recording = False
        spans, self._spans = self._spans, []
        events = []
        for span in spans:
            if span.end is not None:
                start = self.clock.since_zero(span.start) + self._began - self.zero
                duration = self.clock.seconds(span.start, span.end)
                events.append(
                    {
                        "rank": rank,
                        "track": span.track,
                        "name": span.name,
                        "start_us": start * 1e6,
                        "duration_us": duration * 1e6,
                        **({"args": dict(span.args)} if span.args else {}),
                    }
                )
        return events

    def _end_on_side_stream(self, span: _Span, works: list[Any]) -> None:
        """Lets a stream of its own wait for the collectives, so that their end is timed when they end."""
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream()
        with torch.cuda.stream(self._side_stream):
            for work in works:
                work.wait()
            span.end = self.clock.now()


def _entry(action: str, layer: int, nano: int, direction: str) -> str:
    return f"{action} {layer} {NANO_NAMES[nano]} {direction}"
