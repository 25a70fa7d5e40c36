"""Ends a rank that waits for rows of a rank that is gone, and says who waited for whom.

A stream that waits for a word in memory waits forever if nobody writes it, and no library notices. So a thread looks
once a second at the oldest wait of this rank that has not passed: if a rank that it waits for no longer exists, this
process ends with a sentence; if it merely takes long, a warning says so.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_WARN_EVERY_S = 60.0
EXIT_CODE = 71


class Passed(Protocol):
    """What tells whether a stream has got past a point; a CUDA event is one."""

    def query(self) -> bool: ...


@dataclass(frozen=True)
class Wait:
    """A wait that was queued on a stream.

    Attributes:
        passed: tells whether the stream is past it.
        peers: ranks that it waits for.
        number: the exchange.
        what: "rows of" or "room for"; for the sentence.
    """

    passed: Passed
    peers: tuple[int, ...]
    number: int
    what: str


def is_running(pid: int) -> bool:
    """Whether a process of this machine exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Watchdog:
    """Watches the waits of one rank.

    Args:
        rank: this rank.
        processes: process id of every rank, all on this machine.
        missing: given a wait, the peers that have really not delivered yet; may take a moment.
        end: ends this process after the sentence was logged.
    """

    def __init__(
        self,
        rank: int,
        processes: Sequence[int],
        missing: Callable[[Wait], list[int]],
        end: Callable[[], None] = lambda: os._exit(EXIT_CODE),
    ) -> None:
        self._rank, self._processes, self._missing, self._end = rank, processes, missing, end
        # Where process ids of other ranks mean nothing here (separate containers), nobody is taken for dead.
        self._knows = all(is_running(pid) for pid in processes)
        self._waits: deque[Wait] = deque()
        self._oldest_since = (0, 0.0)  # (exchange, when it was first seen as the oldest)
        self._warned_at = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="distca-watchdog", daemon=True)
        self._thread.start()

    def note(self, wait: Wait) -> None:
        """Watch one more wait; waits pass in the order in which they are noted."""
        self._waits.append(wait)

    def stop(self) -> None:
        """Watch no longer."""
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(_LOOK_EVERY_S):
            self._look()

    def _look(self) -> None:
        while self._waits and self._waits[0].passed.query():
            self._waits.popleft()
        if not self._waits:
            return
        wait = self._waits[0]
        missing = self._missing(wait)
        if not missing or wait.passed.query():
            return
        gone = [peer for peer in missing if self._knows and not is_running(self._processes[peer])]
        if gone:
            logger.critical(
                "Rank %d waits for %s exchange %d from rank %s, which has ended; so this rank ends too. Look at the "
                "log of rank %s for the reason, and go on from the last checkpoint with RESUME=latest.",
                *(self._rank, wait.what, wait.number, _list(gone), _list(gone)),
            )
            self._end()
            self._stop.set()
        else:
            self._warn(wait, missing)

    def _warn(self, wait: Wait, missing: list[int]) -> None:
        now = time.monotonic()
        if self._oldest_since[0] != wait.number:
            self._oldest_since = (wait.number, now)
        waited = now - self._oldest_since[1]
        if waited > _WARN_EVERY_S and now - self._warned_at > _WARN_EVERY_S:
            self._warned_at = now
            logger.warning(
                "Rank %d has waited %.0f s for %s exchange %d from rank %s, which is still running.",
                *(self._rank, waited, wait.what, wait.number, _list(missing)),
            )


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
