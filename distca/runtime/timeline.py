"""The times of a rank's compute and transfers for both nano-batches. The timeline and tests of the order read them.

Recording costs two events per span and nothing while it is off, except the time spent serving, which is always
measured: the step log compares it over ranks.
"""

from __future__ import annotations

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
    """Spans of one rank.

    Attributes:
        times_waits: whether :meth:`waiting` times what it encloses.
        order: names of what was queued, in the order in which the host queued it, while recording. Entries are
            "launch q,k,v 3 ping forward" and the like: action, layer, nano-batch, direction.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.clock = Clock(device)
        self.recording = False
        self.times_waits = False
        self.order: list[str] = []
        self._spans: list[_Span] = []
        self._serves: dict[str, list[tuple[Instant, Instant]]] = {"forward": [], "backward": []}
        self._waits: dict[str, list[tuple[Instant, Instant]]] = {}
        self._open: _Span | None = None
        self._reopen: tuple[str, int, int, str] | None = None
        self._side_stream: torch.cuda.Stream | None = None

    def start_recording(self) -> None:
        """Record from now on, with a zero that all ranks share; every rank calls it."""
        self.clock.synchronize()
        self.order.clear()
        self.recording = True

    @contextmanager
    def compute(self, name: str, layer: int, nano: int, direction: str, kinds: str = "") -> Iterator[None]:
        """Time work queued inside the block; ``kinds`` of attention layers stand behind the span's name."""
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
        """Time the attention server, which computes layers of these kinds; counted in :meth:`serve_seconds` also while
        nothing is recorded."""
        with self.compute("serve", layer, nano, direction, kinds):
            start = self.clock.work()
            yield
            self._serves[direction].append((start, self.clock.work()))

    @contextmanager
    def stage(self, name: str, track: str = "stage") -> Iterator[None]:
        """Time a part of the step other than a layer's, on a track of its own, or a whole step on the track ``steps``;
        layers' spans may lie inside."""
        if not self.recording:
            yield
            return
        span = _Span(track, name, self.clock.now())
        self._spans.append(span)
        yield
        span.end = self.clock.now()

    def open(self, name: str, layer: int, nano: int, direction: str, *, past_launches: bool = False) -> None:
        """Begin a span that ends at the next :meth:`close`, at the next span or, unless it goes on ``past_launches``,
        when a transfer is launched."""
        if self.recording:
            self.close()
            self.order.append(_entry(name, layer, nano, direction))
            self._open = _Span(f"compute {NANO_NAMES[nano]}", f"{name} {layer} {direction}", self.clock.now())
            self._spans.append(self._open)
            self._reopen = (name, layer, nano, direction) if past_launches else None

    def close(self) -> None:
        """End the span that :meth:`open` began, if there is one."""
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
        """Note a transfer that was just launched, and when its collectives end, of both hops; ``args`` are shown with
        it. Transfers of a track follow each other: each half of each kind has one of its own."""
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
        """Note that a transfer is about to be waited for."""
        if self.recording:
            self.close()
            self.order.append(_entry(f"join {what}", layer, nano, direction))

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Time how long compute waits for a transfer, with what then puts rows in their places."""
        if not self.times_waits:
            yield
            return
        start = self.clock.now()
        yield
        self._waits.setdefault(what, []).append((start, self.clock.now()))

    def take_waits(self) -> dict[str, float]:
        """Seconds that compute waited since the last call, by transfer; blocks until the last wait is over."""
        waits, self._waits = self._waits, {}
        return {what: sum(self.clock.seconds(*each) for each in spans) for what, spans in waits.items()}

    def take_serves(self) -> dict[str, list[float]]:
        """Seconds of every time this rank served since the last call, in order, by direction; blocks until the last
        serve is done."""
        seconds = {
            direction: [self.clock.seconds(start, end) for start, end in spans]
            for direction, spans in self._serves.items()
        }
        self._serves = {"forward": [], "backward": []}
        return seconds

    def serve_seconds(self) -> dict[str, float]:
        """The same added up."""
        return {direction: sum(seconds) for direction, seconds in self.take_serves().items()}

    def take(self, rank: int) -> list[dict[str, Any]]:
        """End recording and return its spans as {rank, track, name, start_us, duration_us} and, of
        transfers, args."""
        self.close()
        self.recording = False
        spans, self._spans = self._spans, []
        events = []
        for span in spans:
            if span.end is not None:
                start = self.clock.since_zero(span.start)
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
        """Let a stream of its own wait for the collectives, so that their end is timed where they end."""
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream()
        with torch.cuda.stream(self._side_stream):
            for work in works:
                work.wait()
            span.end = self.clock.now()


def _entry(action: str, layer: int, nano: int, direction: str) -> str:
    return f"{action} {layer} {NANO_NAMES[nano]} {direction}"
