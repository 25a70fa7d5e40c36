"""A board in the store of torch.distributed: ranks post there that their nodes live, and what the run ends with.

A store that is gone may keep who asks it waiting without end. So only threads of this module ask, and the others see
what they learnt last and how long ago.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from distca.log import MISTAKE

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0
_BEAT_S = 5.0
_PREFIX = "distca/health"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure that ends a run.

    Attributes:
        rank: who says it.
        kind: of the error, by which ranks that all refuse for one reason see that it has been said; empty where no rank
            failed but one was lost.
        sentence: what happened.
        details: a trace, or what to do next.
        code: with which exit code all ranks end.
    """

    rank: int
    kind: str
    sentence: str
    details: str
    code: int

    @property
    def is_mistake(self) -> bool:
        """Whether a user's mistake ends the run: ranks may all find it, each by itself."""
        return self.code == MISTAKE


class Board:
    """One rank's view of the store.

    Args:
        rank: this rank.
        nodes: name of each rank's node.
        store: where it is; None takes that of this process's world.

    Attributes:
        failure: what the run ends with, once any rank has posted it.
    """

    def __init__(self, rank: int, nodes: Sequence[str], store: dist.Store | None = None) -> None:
        self.failure: Failure | None = None
        self._size, names = len(nodes), sorted(set(nodes))
        self._node, self._names = names.index(nodes[rank]), names
        # One rank of a node listens for the other nodes.
        self._listens = nodes.index(nodes[rank]) == rank and len(names) > 1
        self._beats = {name: (0, time.monotonic()) for name in names}
        self._answered = time.monotonic()
        self._stop = threading.Event()
        self._broken_at: float | None = None
        self._store = _own_connection(store)
        self._thread = threading.Thread(target=self._follow, name="distca-board", daemon=True)
        self._thread.start()

    def post(self, failure: Failure, seconds: float = 3.0) -> Failure:
        """End the run with ``failure``, unless it ends already; returns what it ends with."""

        def ask() -> None:
            if self._store.add(f"{_PREFIX}/failures", 1) == 1:
                self._store.set(f"{_PREFIX}/failure", json.dumps(asdict(failure)))
                self.failure = self.failure or failure
            else:
                self._read()

        self._within(seconds, ask)
        return self.failure or failure

    def heard(self, expected: int, seconds: float) -> None:
        """Say that this rank has said what the run ends with, and wait until ``expected`` ranks have."""

        def ask() -> None:
            self._store.add(f"{_PREFIX}/heard", 1)
            while self._store.add(f"{_PREFIX}/heard", 0) < expected:
                time.sleep(0.1)

        self._within(seconds, ask)

    def lost_nodes(self, seconds: float) -> list[str]:
        """Nodes that have not been heard of for so long; only one rank of each node looks."""
        now = time.monotonic()
        if not self._listens or self.silence() > _BEAT_S:  # who hears nothing cannot say who is silent
            return []
        return [name for name, (_, at) in self._beats.items() if name != self._names[self._node] and now - at > seconds]

    def silence(self) -> float:
        """Seconds since the store answered last."""
        return time.monotonic() - self._answered

    @property
    def broken(self) -> float:
        """Seconds since which every question to the store has failed; 0 where the last one did not."""
        return 0.0 if self._broken_at is None else time.monotonic() - self._broken_at

    def stop(self) -> None:
        """Ask no more."""
        self._stop.set()
        self._thread.join(5)

    def _within(self, seconds: float, ask: Any) -> None:
        """Call ``ask``, but not wait for it any longer; what it raises says only that the store is gone."""

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
        self._store.add(f"{_PREFIX}/beat/{self._names[self._node]}", 1)
        for name in self._names if self._listens else ():
            beats = self._store.add(f"{_PREFIX}/beat/{name}", 0)
            if beats != self._beats[name][0]:
                self._beats[name] = (beats, time.monotonic())

    def _read(self) -> None:
        """Reads the failure that was posted; it comes right after the count of failures."""
        self.failure = self.failure or Failure(**json.loads(self._store.get(f"{_PREFIX}/failure")))


def _own_connection(store: Any) -> Any:
    """A connection to the store that nobody else waits on."""
    if store is None:
        store = dist.distributed_c10d._get_default_store()
    return store.clone()
