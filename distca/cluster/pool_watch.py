"""Watches over a pool of ranks (homes) and servers without a model; breaks its exchanges off when a server is gone.

A rank that waits for rows of a lost one does not always learn of the loss. Gloo may not report a closed connection,
kernels of NCCL spin, and a lost node closes no connection. So every rank and server has a thread that looks into the
pool's store twice a second. Servers count up signs of life there. The homes' first rank notes in the store when they
stay away. All threads see the note and break off the exchanges of their rank.
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
STARTING_S = 60.0
"""The same before the first generation. A server that compiles a kernel may hold Python's lock; its thread then
waits."""


class Breakable(Protocol):
    """A transport whose exchanges can be broken off.

    Attributes:
        broken: whether they were, or an exchange has failed.
    """

    broken: bool

    def break_off(self) -> None:
        """Makes exchanges that are under way fail; it may be called from another thread."""
        ...


class PoolWatch:
    """One process's watching thread.

    Args:
        store: the pool's store.
        me: this process, on a server without a model, which counts up signs of life; None on homes.
    """

    def __init__(self, store: PoolStore, me: Process | None = None) -> None:
        self._store, self._me = store, me
        self._generation, self._transport = 0, None  # type: int, Breakable | None
        self._seen: dict[Process, tuple[int, float]] = {}
        self._others: dict[Process, tuple[int, float]] = {}  # servers outside the generation, since is_gone was asked
        self._quiet, self._looked = QUIET_S, time.monotonic()
        self._changing, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="distca-pool", daemon=True)
        self._thread.start()
        # A thread that is inside torch while Python shuts down could end the process with an error.
        atexit.register(self.stop)

    def await_first(self, servers: Sequence[Process]) -> None:
        """Reads the signs of life of servers that have come, before there is a generation."""
        with self._changing:
            self._listen_to(servers, STARTING_S)

    def begin(self, generation: int, transport: Breakable, servers: Sequence[Process] = ()) -> None:
        """Starts to watch over a generation of the pool, which is the pool between two changes of its servers.

        Args:
            generation: the generation's number.
            transport: this rank's transport in the pool.
            servers: the servers whose signs of life this rank reads; empty on all ranks but the homes' first.
        """
        with self._changing:
            self._generation, self._transport = generation, transport
            self._listen_to(servers, QUIET_S)

    def end(self) -> None:
        """Ends the watch over the generation; after this call its transport is not broken off any more."""
        with self._changing:
            self._transport = None

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join(5)
        atexit.unregister(self.stop)

    def is_gone(self, server: Process) -> bool:
        """Whether a server's process has ended, or has given no sign of life for ``QUIET_S`` seconds; before the
        first generation, for ``STARTING_S``.

        The first question about a server outside the generation begins its silence."""
        _, since = self._seen.get(server) or self._others.setdefault(server, (-1, self._looked))
        return not server.is_running() or self._looked - since > self._quiet

    def _listen_to(self, servers: Sequence[Process], quiet: float) -> None:
        # Silence counts until the last look. Python's lock may keep the thread from looking for long.
        self._quiet, self._looked = quiet, time.monotonic()
        self._seen = dict.fromkeys(servers, (-1, self._looked))

    def _follow(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            try:
                if self._me is not None:
                    self._store.count(_sign(self._me), 1)
                with self._changing:
                    self._look()
            except Exception:  # the store may be gone; other threads report that
                logger.debug("The pool's store does not answer.", exc_info=True)

    def _look(self) -> None:
        """Reads signs of life; notes a lost server in the store; breaks the transport off if it is noted there."""
        transport, key = self._transport, f"broken/{self._generation}"
        for servers in (self._seen, self._others):
            for server, (signs, _) in list(servers.items()):
                now = self._store.count(_sign(server))
                if now != signs:
                    servers[server] = now, time.monotonic()
        self._looked = time.monotonic()
        if transport is None:
            return
        if not self._store.has(key):
            if not transport.broken and not any(map(self.is_gone, self._seen)):
                return
            self._store.put(key, True)
        if not transport.broken:
            # Homes warn of the server when they go on without it. At the end of a run servers just leave.
            logger.debug("Generation %d of the pool is broken off: a rank of it is gone.", self._generation)
            transport.break_off()


def _sign(server: Process) -> str:
    return f"sign/{server}"
