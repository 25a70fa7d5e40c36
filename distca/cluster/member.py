"""Homes and servers without a model of one run: how they meet before it begins, and how servers learn that it is over.

Homes alone are torch.distributed's default world. Both meet in the store behind it (``distca.cluster.pool_store``).
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from distca.cluster.pool_store import MAY_GO, POLL_S, PoolStore
from distca.cluster.process import Member

logger = logging.getLogger(__name__)

MEETING = timedelta(minutes=9)
"""In which servers have to come; other homes wait in a collective meanwhile, which gives up after ten."""
_LEAVING_S = 10.0
_MISSING = (
    "Server {} of the {} that `servers` asks for has not come: start servers with SERVERS={} of pretrain_llama.sh, "
    "on every machine alike."
)


class Members:
    """All homes, then all servers; every process of the run makes one.

    Attributes:
        everyone: homes by rank, then servers by number.
        own: this process's number among them.
        homes: how many of them are homes.
        store: the place where they tell each other how they are.
    """

    def __init__(self, meeting: PoolStore, everyone: list[Member], own: int, homes: int) -> None:
        self._meeting, self.everyone, self.own, self.homes = meeting, everyone, own, homes

    @staticmethod
    def of_homes(servers: int) -> Members:
        """Meet on a home; every home calls it together.

        Raises:
            LaunchError: a server does not come.
        """
        meeting, homes = PoolStore(c10d._get_default_store(), "run"), dist.get_world_size()
        everyone = [Member.here()] * homes
        dist.all_gather_object(everyone, everyone[0])
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            for number in range(servers):
                said = _MISSING.format(number, servers, servers)
                everyone.append(meeting.take(f"server/{number}", MEETING, said))
            meeting.put("members", (homes, everyone))
            found = [everyone]
        dist.broadcast_object_list(found)
        return Members(meeting, found[0], dist.get_rank(), homes)

    @staticmethod
    def of_server(store: dist.Store, number: int) -> Members:
        """Meet on a server.

        Args:
            store: that of the homes' world.
            number: of this server, from 0.

        Raises:
            LaunchError: no homes come.
        """
        meeting = PoolStore(store, "run")
        meeting.put(f"server/{number}", Member.here())
        homes, everyone = meeting.take("members", MEETING, "No homes have come that ask for servers without a model.")
        me = Member.here()
        if me in everyone:
            return Members(meeting, everyone, homes + number, homes)
        return Members(meeting, [*everyone, me], len(everyone), homes)  # it comes while homes train

    @property
    def is_server(self) -> bool:
        """Whether this process is a server without a model."""
        return self.own >= self.homes

    @property
    def may_go(self) -> set[int]:
        """The members without whom the run goes on: servers."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return set(range(self.homes, len(self.everyone))) if device in MAY_GO else set()

    @property
    def store(self) -> dist.Store:
        """The store that all of them know, without a prefix that only homes have."""
        return self._meeting.store

    def name(self, number: int) -> str:
        """The name of a process in sentences."""
        return f"Rank {number}" if number < self.homes else f"Server {number - self.homes}"

    def is_over(self) -> bool:
        """On a server: whether homes have let their servers go. The first such answer says that it leaves."""
        if not self._meeting.has("over"):
            return False
        self._meeting.put(f"left/{self.own - self.homes}", True)
        return True

    def let_servers_go(self) -> None:
        """On homes, when nobody watches over others any more: servers end, and the first home waits until they do."""
        if self.own:
            return
        self._meeting.put("over", True)
        until = time.monotonic() + _LEAVING_S
        for number, server in enumerate(self.everyone[self.homes :]):
            while server.process.is_running() and not self._meeting.has(f"left/{number}"):
                if time.monotonic() > until:
                    logger.warning("Server %d has not ended in %.0f s after the run.", number, _LEAVING_S)
                    break
                time.sleep(POLL_S)
