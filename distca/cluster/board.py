"""A board on which ranks post signs of life and the failure that ends the run.

The board is a part of torch.distributed's key-value store. If the store is gone, a question to it may never return. So
only threads of this module ask it. Other threads read the latest answer and its age.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from distca.log import MISTAKE

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0
"""Seconds between two looks at the store."""
_BEAT_S = 5.0
"""Seconds between two signs of life of a rank."""
_PREFIX = "distca/health"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure that ends a run.

    Attributes:
        rank: the rank that posted it.
        kind: class name of the error. Ranks often find the same mistake; a rank whose own mistake has this name does
            not report it once more. Empty where a rank was lost without an error.
        sentence: what happened.
        details: a traceback, or what to do next.
        code: the exit code of all ranks.
    """

    rank: int
    kind: str
    sentence: str
    details: str
    code: int

    @property
    def is_mistake(self) -> bool:
        """Whether the failure is a user's mistake, which all ranks may find by themselves."""
        return self.code == MISTAKE


class Board:
    """One rank's access to the board, with a thread that reads it once a second.

    Args:
        rank: this rank.
        names: by rank, the name under which it posts signs of life. Ranks of one node share a name.
        store: the store that has the board; None takes the one of torch.distributed in this process.
        listens: whether this rank looks for signs of life under other names, if it is the first rank with its name.

    Attributes:
        failure: the failure that ends the run; None until a rank has posted one.
    """

    def __init__(
        self, rank: int, names: Sequence[str], store: dist.Store | None = None, *, listens: bool = True
    ) -> None:
        self.failure: Failure | None = None
        self._name, self._names = names[rank], sorted(set(names))
        self._listens = listens and names.index(names[rank]) == rank and len(self._names) > 1
        self._beats = {name: (0, time.monotonic()) for name in self._names}
        self._answered = time.monotonic()
        self._stop = threading.Event()
        self._broken_at: float | None = None
        self._store = _own_connection(store)
        self._thread = threading.Thread(target=self._follow, name="distca-board", daemon=True)
        self._thread.start()

    def post(self, failure: Failure, seconds: float = 3.0) -> Failure:
        """Posts a failure, unless another rank was first; returns the failure that ends the run.

        It waits for the store no longer than ``seconds``."""

        def ask() -> None:
            if self._store.add(f"{_PREFIX}/failures", 1) == 1:
                self._store.set(f"{_PREFIX}/failure", json.dumps(asdict(failure)))
                self.failure = self.failure or failure
            else:
                self._read()

        self.within(seconds, ask)
        return self.failure or failure

    def heard(self, expected: int, seconds: float) -> None:
        """Posts that this rank has reported the failure; waits at most ``seconds`` until ``expected`` ranks have."""

        def ask() -> None:
            self._store.add(f"{_PREFIX}/heard", 1)
            while self._store.add(f"{_PREFIX}/heard", 0) < expected:
                time.sleep(0.1)

        self.within(seconds, ask)

    def silent(self, seconds: float) -> list[str]:
        """Returns the names without a sign of life for ``seconds``; empty on all but the first rank with a name."""
        now = time.monotonic()
        if not self._listens or self.silence() > _BEAT_S:  # without answers of the store there is no news of others
            return []
        return [name for name, (_, at) in self._beats.items() if name != self._name and now - at > seconds]

    def silence(self) -> float:
        """Returns the seconds since the store answered last."""
        return time.monotonic() - self._answered

    @property
    def broken(self) -> float:
        """The seconds since questions to the store have begun to fail; 0 if the last one was answered."""
        return 0.0 if self._broken_at is None else time.monotonic() - self._broken_at

    def stop(self) -> None:
        """Ends the thread that reads the board."""
        self._stop.set()
        self._thread.join(5)

    def within(self, seconds: float, ask: Callable[[], Any]) -> None:
        """Calls ``ask``, which asks a store, in a thread; waits at most ``seconds``. Its errors are not raised."""

        def quietly() -> None:
            try:
                ask()
            except Exception:
                logger.debug("The store does not answer.", exc_info=True)

        thread = threading.Thread(target=quietly, daemon=True)
        thread.start()
        thread.join(seconds)

    def _follow(self) -> None:
        beaten = 0.0
        while not self._stop.wait(_PERIOD_S):
            try:
                if time.monotonic() - beaten > _BEAT_S:
                    self._beat()
                    beaten = time.monotonic()
                if self.failure is None and self._store.check([f"{_PREFIX}/failure"]):
                    self._read()
                self._answered, self._broken_at = time.monotonic(), None
            except Exception:
                logger.debug("The store does not answer.", exc_info=True)
                self._broken_at = self._broken_at or time.monotonic()

    def _beat(self) -> None:
        """Counts up this rank's signs of life; on the first rank with a name also reads those under other names."""
        self._store.add(f"{_PREFIX}/beat/{self._name}", 1)
        for name in self._names if self._listens else ():
            beats = self._store.add(f"{_PREFIX}/beat/{name}", 0)
            if beats != self._beats[name][0]:
                self._beats[name] = (beats, time.monotonic())

    def _read(self) -> None:
        """Reads the failure that another rank has posted, or is about to post, as it counted it up before."""
        self.failure = self.failure or Failure(**json.loads(self._store.get(f"{_PREFIX}/failure")))


def _own_connection(store: Any) -> Any:
    """Returns a new connection to the store, as a waiting question would block other users of a connection."""
    if store is None:
        store = dist.distributed_c10d._get_default_store()
    return store.clone()
