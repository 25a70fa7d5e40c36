"""Watching over a pool with servers without a model: whether they live, and whether their pool is to be given up.

A rank that waits for rows of one that is gone does not always learn of it: gloo may keep closed connections to itself,
NCCL's kernels spin, and a lost node closes none. So a thread of every rank of the pool looks into its store twice a
second. Servers leave signs of life there. The homes' first rank says when a server's stay away. All ranks then break
off what is under way.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from distca.cluster.pool_store import PoolStore
from distca.cluster.process import Process

logger = logging.getLogger(__name__)

_PERIOD_S = 0.5
"""Seconds between two looks into the store."""
QUIET_S = 20.0
"""Seconds without a sign of life after which a server counts as gone."""


class Breakable(Protocol):
    """A transport that can be broken off.

    Attributes:
        broken: whether it is.
    """

    broken: bool

    def break_off(self) -> None:
        """Let exchanges that are under way fail; called from another thread."""
        ...


class PoolWatch:
    """One rank's thread that watches over its pool.

    Args:
        store: the pool's.
        me: the server without a model that leaves signs of life; None on homes.
    """

    def __init__(self, store: PoolStore, me: Process | None = None) -> None:
        self._store, self._me = store, me
        self._generation, self._transport = 0, None  # type: int, Breakable | None
        self._seen: dict[Process, tuple[int, float]] = {}
        self._changing, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="distca-pool", daemon=True)
        self._thread.start()
        # A thread that is inside torch while Python shuts down could end the process with an error.
        atexit.register(self.stop)

    def begin(self, generation: int, transport: Breakable, servers: Sequence[Process] = ()) -> None:
        """Watch over a generation of the pool.

        Args:
            generation: its number.
            transport: this rank's, to all others.
            servers: those whose signs of life this rank looks for; one rank does.
        """
        with self._changing:
            self._generation, self._transport = generation, transport
            self._seen = {each: (-1, time.monotonic()) for each in servers}

    def end(self) -> None:
        """Watch over no pool; nothing is broken off any more when it returns."""
        with self._changing:
            self._transport = None

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(5)
        atexit.unregister(self.stop)

    def is_gone(self, server: Process) -> bool:
        """Whether a server's process has ended, or gives no sign of life."""
        _, since = self._seen.get(server, (0, time.monotonic()))
        return not server.is_running() or time.monotonic() - since > QUIET_S

    def _follow(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            try:
                if self._me is not None:
                    self._store.count(_sign(self._me), 1)
                with self._changing:
                    self._look()
            except Exception:  # the store may be gone, which others tell
                logger.debug("The pool's store does not answer.", exc_info=True)

    def _look(self) -> None:
        transport, key = self._transport, f"broken/{self._generation}"
        if transport is None:
            return
        for server, (signs, _) in list(self._seen.items()):
            now = self._store.count(_sign(server))
            if now != signs:
                self._seen[server] = now, time.monotonic()
        if not self._store.has(key):
            if not transport.broken and not any(map(self.is_gone, self._seen)):
                return
            self._store.put(key, True)
        if not transport.broken:
            logger.info("Generation %d of the pool is broken off: a rank of it is gone.", self._generation)
            transport.break_off()


def _sign(server: Process) -> str:
    return f"sign/{server}"
