"""Finds the oldest wait of this rank's CUDA streams that has not passed, and the ranks for which it waits.

The NVSHMEM transport makes streams wait for a signal that another rank writes into memory. If that rank is gone, the
stream waits forever, and no library reports it. A question to CUDA about the stream may then wait forever too: a full
stream blocks the training thread inside the driver, with the driver's locks held. So a separate thread asks CUDA. If it
gets no answer for a while, the wait counts as stuck.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

_QUICK_S = 0.2
"""Seconds that :meth:`Waits.stuck` waits for the asking thread."""
_ANSWER_S = 20.0
"""Seconds without an answer of CUDA after which the oldest wait counts as stuck."""


class Passed(Protocol):
    """An object that says whether a stream is past a place in its work, such as a CUDA event."""

    def query(self) -> bool: ...


@dataclass(frozen=True)
class Wait:
    """A wait that was queued on a stream.

    Attributes:
        passed: says whether the stream is past the wait.
        peers: the ranks for which it waits, numbered as in the server pool.
        number: number of the exchange of rows to which it belongs.
        what: a word for messages: "rows of" the exchange, or "room that is held by" it.
    """

    passed: Passed
    peers: tuple[int, ...]
    number: int
    what: str


@dataclass(frozen=True)
class Stuck:
    """The oldest wait that has not passed.

    Attributes:
        wait: the wait.
        missing: the global ranks that have not sent their signal.
        seconds: the time since it was first seen as the oldest wait.
    """

    wait: Wait
    missing: tuple[int, ...]
    seconds: float


class Waits:
    """The waits of one rank's streams.

    Args:
        names: the global rank of each rank of the server pool.
        missing: a function that returns the peers of a wait whose signals have not come yet. It reads GPU memory, so it
            may not return.
    """

    def __init__(self, names: Sequence[int], missing: Callable[[Wait], list[int]]) -> None:
        self._names, self._missing = names, missing
        self._waits: deque[Wait] = deque()
        self._asking: threading.Thread | None = None
        self._asked_at = 0.0
        self._answer: tuple[Wait, list[int]] | None = None
        self._oldest: Wait | None = None
        self._since = 0.0  # the time at which this wait was first seen as the oldest

    def note(self, wait: Wait) -> None:
        """Adds a wait; waits pass in the order in which they are added."""
        self._waits.append(wait)

    def stuck(self) -> Stuck | None:
        """Returns the oldest wait if a rank's signal is missing for it, else None; it takes a fraction of a second."""
        found = self._ask()
        if found is None:
            self._oldest = None
            return None
        wait, missing = found
        if self._oldest is not wait:
            self._oldest, self._since = wait, time.monotonic()
        return Stuck(wait, tuple(self._names[peer] for peer in missing), time.monotonic() - self._since)

    def _ask(self) -> tuple[Wait, list[int]] | None:
        """Returns the oldest wait and its missing peers, or None. Without an answer for long, all peers are missing."""
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
        """Removes waits that have passed, and answers for the oldest one that is left; runs in the asking thread."""
        while self._waits and self._waits[0].passed.query():
            self._waits.popleft()
        if not self._waits:
            return
        wait = self._waits[0]
        missing = self._missing(wait)
        if missing and not wait.passed.query():
            self._answer = (wait, missing)
