"""Waits that streams queued: which is the oldest that has not passed, and which ranks it still waits for.

A stream that waits for a signal in memory waits forever if nobody writes it, and no library notices. Who asks must not
get stuck with it. A call into CUDA may: while the training thread cannot queue any more work behind the wait, it holds
locks of the driver. So a thread of its own asks the GPU, and one that does not answer counts as not having delivered.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

_QUICK_S = 0.2
_ANSWER_S = 20.0


class Passed(Protocol):
    """An object that tells whether a stream has got past a point; a CUDA event is one."""

    def query(self) -> bool: ...


@dataclass(frozen=True)
class Wait:
    """A wait that was queued on a stream.

    Attributes:
        passed: tells whether the stream is past it.
        peers: ranks of the server pool that it waits for.
        number: the exchange.
        what: "rows of" that exchange, or "room that is held by" it; for the sentence.
    """

    passed: Passed
    peers: tuple[int, ...]
    number: int
    what: str


@dataclass(frozen=True)
class Stuck:
    """The oldest wait that has not passed.

    Attributes:
        wait: it.
        missing: global ranks that it waits for.
        seconds: for how long that has been known.
    """

    wait: Wait
    missing: tuple[int, ...]
    seconds: float


class Waits:
    """The waits of one rank's streams.

    Args:
        names: global rank of each rank of the server pool.
        missing: given a wait, the peers that have really not delivered yet; may get stuck.
    """

    def __init__(self, names: Sequence[int], missing: Callable[[Wait], list[int]]) -> None:
        self._names, self._missing = names, missing
        self._waits: deque[Wait] = deque()
        self._asking: threading.Thread | None = None
        self._asked_at = 0.0
        self._answer: tuple[Wait, list[int]] | None = None
        self._oldest: Wait | None = None
        self._since = 0.0  # when it was first seen as the oldest

    def note(self, wait: Wait) -> None:
        """Watch one more wait; waits pass in the order in which they are noted."""
        self._waits.append(wait)

    def stuck(self) -> Stuck | None:
        """The oldest wait for which somebody is missing; takes no longer than a fraction of a second."""
        found = self._ask()
        if found is None:
            self._oldest = None
            return None
        wait, missing = found
        if self._oldest is not wait:
            self._oldest, self._since = wait, time.monotonic()
        return Stuck(wait, tuple(self._names[peer] for peer in missing), time.monotonic() - self._since)

    def _ask(self) -> tuple[Wait, list[int]] | None:
        if self._asking is None:
            self._answer, self._asked_at = None, time.monotonic()
            self._asking = threading.Thread(target=self._ask_gpu, name="distca-waits", daemon=True)
            self._asking.start()
        self._asking.join(_QUICK_S)
        if not self._asking.is_alive():
            self._asking = None
            return self._answer
        waits = list(self._waits)
        silent = time.monotonic() - self._asked_at > _ANSWER_S
        return (waits[0], list(waits[0].peers)) if waits and silent else None

    def _ask_gpu(self) -> None:
        while self._waits and self._waits[0].passed.query():
            self._waits.popleft()
        if not self._waits:
            return
        wait = self._waits[0]
        missing = self._missing(wait)
        if missing and not wait.passed.query():
            self._answer = (wait, missing)
