"""The times of one rank's compute and transfers, for timelines in Perfetto and the step log.

A *span* is a name with a start and an end. A *track* is a row of the timeline. A *nano-batch* is a micro-batch or
one of its two parts, *ping* and *pong*.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
    """The spans of one rank. Methods take ``direction``, "forward" or "backward", and ``nano``, 1 for pong, else 0.

    Args:
        layers: a span of layer n shows the number layers[n], or n if ``layers`` is empty. Example: a process that
            computes attention of the layers 1 and 3 counts them as 0 and 1, and gives (1, 3).

    Attributes:
        clock: this rank's clock; on GPUs it takes times of the current stream.
        zero: time 0 of recorded spans, in seconds since 1970.
        times_waits: whether :meth:`waiting` measures waits for transfers; else it does nothing.
        order: the recorded actions in the order in which the host queued them, such as "launch q,k,v 3 ping forward".
    """

    def __init__(self, device: torch.device | str, layers: Sequence[int] = ()) -> None:
        self.clock, self._layers = Clock(device), layers
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
        """Starts recording; all ranks of the default process group call this together.

        ``zero`` is time 0 of spans, in seconds since 1970; None takes the present."""
        self.clock.synchronize()
        self._began = time.time()
        self.zero = self._began if zero is None else zero
        self.order.clear()
        self.recording = True

    @contextmanager
    def compute(self, name: str, layer: int, nano: int, direction: str, kinds: str = "") -> Iterator[None]:
        """Records the work queued inside the block as a span, whose name ends with ``kinds`` if there are any."""
        if not self.recording:
            yield
            return
        self.close()
        self.order.append(_entry(name, layer, nano, direction))
        shown = self._shown(name, layer, direction) + f", {kinds}" * bool(kinds)
        span = _Span(f"compute {NANO_NAMES[nano]}", shown, self.clock.now())
        self._spans.append(span)
        yield
        span.end = self.clock.now()

    @contextmanager
    def serve(self, layer: int, nano: int, direction: str, kinds: str = "") -> Iterator[None]:
        """Measures attention that the block queues, even without recording. :meth:`take_serves` returns the seconds."""
        with self.compute("serve", layer, nano, direction, kinds):
            start = self.clock.work()
            yield
            self._serves[direction].append((start, self.clock.work()))

    @contextmanager
    def stage(self, name: str, track: str = "stage") -> Iterator[None]:
        """Records the block as a span, which may contain other spans."""
        if not self.recording:
            yield
            return
        span = _Span(track, name, self.clock.now())
        self._spans.append(span)
        yield
        span.end = self.clock.now()

    def open(self, name: str, layer: int, nano: int, direction: str, *, past_launches: bool = False) -> None:
        """Begins a span of compute. It ends at the next span of compute, :meth:`launched`, :meth:`joined`,
        :meth:`close` or :meth:`take`.

        With ``past_launches``, :meth:`launched` ends this span and begins a new span of the same name."""
        if self.recording:
            self.close()
            self.order.append(_entry(name, layer, nano, direction))
            self._open = _Span(f"compute {NANO_NAMES[nano]}", self._shown(name, layer, direction), self.clock.now())
            self._spans.append(self._open)
            self._reopen = (name, layer, nano, direction) if past_launches else None

    def close(self) -> None:
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
        """Records a transfer that was just launched, as a span until all operations in ``handle.works`` have ended.

        Without such operations there is no span, but only an entry in ``order``. ``what`` names the moved tensors, such
        as "q,k,v". Perfetto shows ``args`` beside the span."""
        if not self.recording:
            return
        goes_on = self._reopen
        self.close()
        self.order.append(_entry(f"launch {what}", layer, nano, direction))
        track = f"transfers {NANO_NAMES[nano]} {what} {direction}"
        span = _Span(track, self._shown(what, layer, direction), self.clock.now(), args=args)
        works = getattr(handle, "works", [])
        if works:
            self._spans.append(span)
            if self.clock.on_gpu:
                self._end_on_side_stream(span, works)
            elif isinstance(handle, CollectiveHandle | BreakableHandle):
                handle.tell(lambda: setattr(span, "end", self.clock.now()))
        if goes_on:
            self.open(*goes_on, past_launches=True)

    def _shown(self, what: str, layer: int, direction: str) -> str:
        return f"{what} {self._layers[layer] if self._layers else layer} {direction}"

    def joined(self, what: str, layer: int, nano: int, direction: str) -> None:
        """Adds to ``order`` the caller's wait for a transfer."""
        if self.recording:
            self.close()
            self.order.append(_entry(f"join {what}", layer, nano, direction))

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Measures the block, a wait for the transfer ``what``. :meth:`take_waits` returns the seconds."""
        if not self.times_waits:
            yield
            return
        start = self.clock.now()
        yield
        self._waits.setdefault(what, []).append((start, self.clock.now()))

    def take_waits(self) -> dict[str, float]:
        """Returns by ``what`` the seconds waited since the last ``take_waits``; blocks until these waits end."""
        waits, self._waits = self._waits, {}
        return {what: sum(self.clock.seconds(*each) for each in spans) for what, spans in waits.items()}

    def take_serves(self) -> dict[str, list[float]]:
        """Returns by direction the seconds of each :meth:`serve` block since the last ``take_serves``, in order.

        Blocks until the device has computed these blocks."""
        seconds = {
            direction: [self.clock.seconds(start, end) for start, end in spans]
            for direction, spans in self._serves.items()
        }
        self._serves = {"forward": [], "backward": []}
        return seconds

    def serve_seconds(self) -> dict[str, float]:
        return {direction: sum(seconds) for direction, seconds in self.take_serves().items()}

    def take(self, rank: int) -> list[dict[str, Any]]:
        """Ends recording; returns rank, track, name, start_us, duration_us and any args of each ended span."""
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
        """Takes the span's end on a side stream, so that the current stream does not wait for the transfer.

        A transfer that failed gets no span. ``Handle.wait`` handles its error later."""
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream()
        with torch.cuda.stream(self._side_stream), suppress(RuntimeError):
            for work in works:
                work.wait()
            span.end = self.clock.now()


def _entry(action: str, layer: int, nano: int, direction: str) -> str:
    return f"{action} {layer} {NANO_NAMES[nano]} {direction}"
