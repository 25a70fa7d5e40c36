"""Makes the ranks of a run and its servers without a model known to each other, and ends the servers after the run.

Ranks that train are called homes. They alone are in torch.distributed's default world. Servers without a model compute
core attention for them. All of them meet in the key-value store behind the homes' world
(``distca.cluster.pool_store``), also servers that come later.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from distca.cluster.pool_store import MAY_GO, POLL_S, PoolStore
from distca.cluster.process import Member
from distca.errors import LaunchError

logger = logging.getLogger(__name__)

MET = "SERVER_MET"
"""The variable with the path of a file that a server makes once it has met its homes.
``distca.cluster.server_processes`` sets it."""
MEETING = timedelta(minutes=9)
"""The time in which servers have to come. All homes but the first wait in a collective meanwhile, which fails after 10
minutes."""
_LEAVING_S = 10.0
"""Seconds that the first home waits for servers to end after the run."""
_LOOK_S = 0.1
"""Seconds between two looks of the first home for servers that have come or ended."""
_MISSING = (
    "Server {} of the {} that `servers` asks for has not come: start servers with SERVERS={} of pretrain_llama.sh, "
    "on every machine alike."
)


class Members:
    """All processes of a run: homes by rank, then servers by number. Every process creates one.

    Attributes:
        everyone: the processes in this order.
        own: this process's number in this order.
        homes: the number of homes.
        store: the store that all of them can reach.
    """

    def __init__(self, meeting: PoolStore, everyone: list[Member], own: int, homes: int) -> None:
        self._meeting, self.everyone, self.own, self.homes = meeting, everyone, own, homes
        self._for_watch: PoolStore | None = None
        self._late: int | None = None  # this server's own number, if it came during the run
        self._left = f"left/{own - homes}"

    @staticmethod
    def of_homes(servers: int) -> Members:
        """Returns the members on a home, once all servers have come; all homes call it together.

        Args:
            servers: the number of servers that the run asks for.

        Raises:
            LaunchError: a server does not come in time, or has ended before it came.
        """
        meeting, homes = PoolStore(c10d._get_default_store(), "run"), dist.get_world_size()
        everyone = [Member.here()] * homes
        dist.all_gather_object(everyone, everyone[0])
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            everyone += _servers_that_come(meeting, servers)
            meeting.put("members", (homes, everyone))
            found = [everyone]
        dist.broadcast_object_list(found)
        return Members(meeting, found[0], dist.get_rank(), homes)

    @staticmethod
    def of_server(store: dist.Store, number: int) -> Members:
        """Returns the members on a server, once the homes have written the list.

        Args:
            store: the store of the homes' world.
            number: this server's number, from 0.

        Raises:
            LaunchError: no homes come in time.
        """
        meeting = PoolStore(store, "run")
        meeting.put(f"server/{number}", Member.here())
        homes, everyone = meeting.take("members", MEETING, "No homes have come that ask for servers without a model.")
        if MET in os.environ:
            with suppress(OSError):  # started by hand with the variables of a server whose launcher has ended
                Path(os.environ[MET]).touch()
        me = Member.here()
        if me in everyone:
            return Members(meeting, everyone, homes + number, homes)
        members = Members(meeting, [*everyone, me], len(everyone), homes)  # this server comes during the run
        arrival = meeting.count("later", 1) - 1
        members._left, members._late = f"left/later/{arrival}", number
        meeting.put(f"later/{arrival}", me)
        return members

    @property
    def is_server(self) -> bool:
        """Whether this process is a server without a model."""
        return self.own >= self.homes

    @property
    def may_go(self) -> set[int]:
        """The numbers of the members whose end does not end the run: the servers."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return set(range(self.homes, len(self.everyone))) if device in MAY_GO else set()

    @property
    def store(self) -> dist.Store:
        """The store that all members can reach, without the prefix of the homes' world."""
        return self._meeting.store

    def name(self, number: int) -> str:
        """Returns the name of a member for messages: "Rank 3" or "Server 0"."""
        if number < self.homes:
            return f"Rank {number}"
        if self._late is not None and number == self.own:
            return f"Server {self._late}"
        if number >= len(self.everyone):
            return "A server that came later"
        return f"Server {number - self.homes}"

    def is_over(self) -> bool:
        """Whether the homes have told servers to end; a server asks, and notes in the store that it leaves."""
        # A process group that forms waits in the store, and would block a connection that it shares with the watch.
        store = self._for_watch = self._for_watch or PoolStore(self.store.clone(), "run")  # type: ignore[attr-defined]
        if not store.has("over"):
            return False
        store.put(self._left, True)
        return True

    def let_servers_go(self) -> None:
        """Tells servers to end, and waits until they have; only the first home does so. The watch over ranks must have
        ended."""
        if self.own:
            return
        self._meeting.put("over", True)
        until = time.monotonic() + _LEAVING_S
        for key, server in self._servers().items():
            while server.process.is_running() and not self._meeting.has(f"left/{key}"):
                if time.monotonic() > until:
                    what = key.replace("later/", "that came later, number ")
                    logger.warning("Server %s has not ended in %.0f s after the run.", what, _LEAVING_S)
                    break
                time.sleep(POLL_S)

    def _servers(self) -> dict[str, Member]:
        """Returns all servers, also those that came during the run, by what follows "left/" where they leave."""
        found = {str(number): server for number, server in enumerate(self.everyone[self.homes :])}
        later = [f"later/{arrival}" for arrival in range(self._meeting.count("later"))]
        # A server that has died between its two writes is missing.
        return found | {key: self._meeting.take(key) for key in later if self._meeting.has(key)}


def tell_of_end(store: dist.Store, number: int, why: str) -> None:
    """Tells the homes that a server has ended before it met them.

    Args:
        store: the store of the homes' world.
        number: the server's number, from 0.
        why: the rest of a sentence about the server, such as "on host1 was killed by SIGKILL".
    """
    PoolStore(store, "run").put(f"ended/{number}", why)


def _servers_that_come(meeting: PoolStore, servers: int) -> list[Member]:
    """Waits for all servers on the first home, and returns them by number.

    Raises:
        LaunchError: a server does not come in time, or has ended before it came.
    """
    until, missing = time.monotonic() + MEETING.total_seconds(), list(range(servers))
    while missing := [number for number in missing if not meeting.has(f"server/{number}")]:
        for number in missing:
            if meeting.has(f"ended/{number}"):
                raise LaunchError(
                    f"Server {number} {meeting.take(f'ended/{number}')} before it met the homes.",
                    "look at the server's output there.",
                )
        if time.monotonic() > until:
            raise LaunchError(_MISSING.format(missing[0], servers, servers), "look at the servers' output.")
        time.sleep(_LOOK_S)
    return [meeting.take(f"server/{number}") for number in range(servers)]
