"""The times of one rank's compute and transfers, for timelines in Perfetto, the step log and tests of the order.

A micro-batch runs as two *nano-batches*, ping and pong, each with its own *tracks* (rows of a timeline). A *span* is a
name with a start and an end. Attention and recurrent calls (attention_call.py) report to the timeline.

Recording needs two CUDA events per span. While it is off, only the seconds of serving attention are measured, which the
step log compares between ranks. The seconds of waiting for transfers are measured if a caller asks for them.
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
        clock: this rank's clock; on GPUs it takes times of the current stream.
        recording: whether spans are recorded.
        zero: the time, in seconds since 1970, that recorded spans count from.
        times_waits: whether :meth:`waiting` measures; callers set it.
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
        """Records from now on; every rank calls it at the same time.

        Args:
            zero: the ``zero`` of other processes, to which spans are to be comparable; None takes this moment.
        """
        self.clock.synchronize()
        self._began = time.time()
        self.zero = self._began if zero is None else zero
        self.order.clear()
        self.recording = True

    @contextmanager
    def compute(self, name: str, layer: int, nano: int, direction: str, kinds: str = "") -> Iterator[None]:
        """Records the work queued inside the block as a span; ``kinds`` of attention layers are added to its name."""
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
        """Measures the attention that this rank computes as a server, for :meth:`serve_seconds`, even when not
        recording. While recording it is a span, too, as in :meth:`compute`."""
        with self.compute("serve", layer, nano, direction, kinds):
            start = self.clock.work()
            yield
            self._serves[direction].append((start, self.clock.work()))

    @contextmanager
    def stage(self, name: str, track: str = "stage") -> Iterator[None]:
        """Records a part of a step that is no layer (track ``stage``), or a whole step (track ``steps``), as a span.

        Spans of layers may lie inside it."""
        if not self.recording:
            yield
            return
        span = _Span(track, name, self.clock.now())
        self._spans.append(span)
        yield
        span.end = self.clock.now()

    def open(self, name: str, layer: int, nano: int, direction: str, *, past_launches: bool = False) -> None:
        """Begins a span that ends at the next :meth:`close`, span, join or launch.

        With ``past_launches`` a span of the same name begins again after a launch."""
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
        """Records a transfer that was just launched, as a span that ends with its last collective.

        Each nano-batch has a track for each ``what`` and direction, so spans of a track do not overlap. ``args`` are
        shown with the span."""
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
        """Records in ``order`` that the caller is about to wait for a transfer."""
        if self.recording:
            self.close()
            self.order.append(_entry(f"join {what}", layer, nano, direction))

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Measures the block, which waits for a transfer and puts its rows in their places, for :meth:`take_waits`."""
        if not self.times_waits:
            yield
            return
        start = self.clock.now()
        yield
        self._waits.setdefault(what, []).append((start, self.clock.now()))

    def take_waits(self) -> dict[str, float]:
        """Returns by transfer the seconds of :meth:`waiting` since the last call; blocks until the last wait ended."""
        waits, self._waits = self._waits, {}
        return {what: sum(self.clock.seconds(*each) for each in spans) for what, spans in waits.items()}

    def take_serves(self) -> dict[str, list[float]]:
        """Returns by direction the seconds of each :meth:`serve` since the last call, in order.

        Blocks until the last one ended."""
        seconds = {
            direction: [self.clock.seconds(start, end) for start, end in spans]
            for direction, spans in self._serves.items()
        }
        self._serves = {"forward": [], "backward": []}
        return seconds

    def serve_seconds(self) -> dict[str, float]:
        """Returns by direction the sum of :meth:`take_serves`."""
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
        """Takes the span's end on a side stream that waits for the collectives, so that compute does not wait here."""
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream()
        with torch.cuda.stream(self._side_stream):
            for work in works:
                work.wait()
            span.end = self.clock.now()


def _entry(action: str, layer: int, nano: int, direction: str) -> str:
    return f"{action} {layer} {NANO_NAMES[nano]} {direction}"
