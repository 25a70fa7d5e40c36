"""Ends a rank that waits for rows of a rank that is gone, and says who waited for whom.

A stream that waits for a word in memory waits forever if nobody writes it, and no library notices. So a thread looks
once a second at the oldest wait of this rank that has not passed: if a rank that it waits for no longer exists, this
process ends with a sentence; if it merely takes long, a warning says so.

The thread itself must not get stuck with the others. A call into CUDA may: while the training thread cannot queue any
more work behind the wait, it holds locks of the driver. So the GPU is asked by a helper thread, and one that does not
answer counts as not having delivered.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from distca.cluster.hostname import machine_name

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_WARN_EVERY_S = 60.0
_GRACE_S = 4.0
_ANSWER_S = 20.0
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
        what: "rows of" that exchange, or "room that is taken by" it; for the sentence.
    """

    passed: Passed
    peers: tuple[int, ...]
    number: int
    what: str


@dataclass(frozen=True)
class Process:
    """A rank's process: its id, and the space of ids in which it means something (machines and containers have their
    own)."""

    pid: int
    space: str

    @staticmethod
    def here() -> Process:
        return Process(os.getpid(), _space_of_ids())

    def is_running(self) -> bool:
        """Whether it exists and is no zombie; taken for running where that cannot be seen from here."""
        if self.space != _space_of_ids():
            return True
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return False
        except OSError:
            return True


def _space_of_ids() -> str:
    """Its name says the machine as well: the first space has the same number on every one."""
    try:
        return f"{machine_name()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return machine_name()


class Watchdog:
    """Watches the waits of one rank.

    Args:
        names: of the ranks, for the sentences: their numbers in the whole world.
        rank: this rank.
        processes: of every rank. One on another machine counts as running: who watches over the whole run hears of its
            death (:mod:`distca.cluster.health`).
        missing: given a wait, the peers that have really not delivered yet; may get stuck.
        end: ends this process after the sentence was logged.
    """

    def __init__(
        self,
        names: Sequence[int],
        rank: int,
        processes: Sequence[Process],
        missing: Callable[[Wait], list[int]],
        end: Callable[[], None] = lambda: os._exit(EXIT_CODE),
    ) -> None:
        self._names, self._rank, self._processes = names, rank, processes
        self._missing, self._end = missing, end
        self._waits: deque[Wait] = deque()
        self._oldest: Wait | None = None
        self._since = 0.0  # when it was first seen as the oldest
        self._warned_at = 0.0
        self._asking: threading.Thread | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="distca-watchdog", daemon=True)
        self._thread.start()
        # A thread that is inside torch while Python shuts down could end the process with an error.
        atexit.register(self.stop)

    def note(self, wait: Wait) -> None:
        """Watch one more wait; waits pass in the order in which they are noted."""
        self._waits.append(wait)

    def stop(self) -> None:
        """Watch no longer."""
        self._stop.set()
        self._thread.join(5)

    def _watch(self) -> None:
        while not self._stop.wait(_LOOK_EVERY_S):
            self._look()

    def _look(self) -> None:
        stuck = self._stuck()
        if stuck is None:
            return
        wait, missing = stuck
        gone = [peer for peer in missing if not self._processes[peer].is_running()]
        if gone:
            # A run that watches its ranks by itself knows the step as well: it may speak first. And a rank that ended
            # as it should delivered before.
            if self._stop.wait(_GRACE_S) or self._stuck() is None:
                return
            logger.critical(
                "Rank %d waits for %s exchange %d from rank %s, which has ended; so this rank ends too. Look at the "
                "log of rank %s for the reason, and go on from the last checkpoint with RESUME=latest.",
                *(self._names[self._rank], wait.what, wait.number, self._list(gone), self._list(gone)),
            )
            self._end()
            self._stop.set()
        else:
            self._warn(wait, missing)

    def _stuck(self) -> tuple[Wait, list[int]] | None:
        """The oldest wait that has not passed and who is missing, if anybody is; asked of the GPU."""
        answers: list[tuple[Wait, list[int]] | None] = []
        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=lambda: answers.append(self._ask()), daemon=True)
            self._asking.start()
            self._asking.join(_ANSWER_S)
        if answers:
            return answers[0]
        waits = list(self._waits)
        return (waits[0], list(waits[0].peers)) if waits else None

    def _ask(self) -> tuple[Wait, list[int]] | None:
        while self._waits and self._waits[0].passed.query():
            self._waits.popleft()
        if not self._waits:
            return None
        wait = self._waits[0]
        missing = self._missing(wait)
        return (wait, missing) if missing and not wait.passed.query() else None

    def _warn(self, wait: Wait, missing: list[int]) -> None:
        now = time.monotonic()
        if self._oldest is not wait:
            self._oldest, self._since = wait, now
        waited = now - self._since
        if waited > _WARN_EVERY_S and now - self._warned_at > _WARN_EVERY_S:
            self._warned_at = now
            logger.warning(
                "Rank %d has waited %.0f s for %s exchange %d from rank %s, which is still running.",
                *(self._names[self._rank], waited, wait.what, wait.number, self._list(missing)),
            )

    def _list(self, ranks: list[int]) -> str:
        return ", ".join(str(self._names[rank]) for rank in ranks)
