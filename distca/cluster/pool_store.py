"""The place where homes and servers without a model meet: a store that both reach, and process groups over all of them.

Homes alone are torch.distributed's default world, because Megatron-Core divides all of it among its groups. Servers are
processes with a world of their own. Both know the store behind the homes' world. Under a prefix of it the homes' first
rank leaves messages that servers read one after the other, and each server leaves its answers.
"""

from __future__ import annotations

import pickle
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from distca.cluster.health import TIMEOUT
from distca.errors import LaunchError

POLL_S = 0.002
"""Seconds between two looks at the store. Nobody waits inside it: its connection is shared by a process's threads."""
_KEPT = 256
"""Messages that the store keeps: by then every server has answered to the older ones."""


class PoolStore:
    """One process's view of the store.

    Args:
        store: that of the homes' world, or another one that all reach.
        pool: number of the pool: the homes of a run may make several, one after the other.
    """

    def __init__(self, store: dist.Store, pool: int = 0) -> None:
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        self._name = f"distca/pool/{pool}"
        self._store = dist.PrefixStore(self._name, store)
        self._messages = 0
        self._telling = threading.Lock()

    def put(self, key: str, value: Any) -> None:
        """Leave a picklable ``value`` for others."""
        self._store.set(key, pickle.dumps(value))  # type: ignore[arg-type]  # it takes bytes too

    def take(self, key: str, patience: timedelta = TIMEOUT, why: str = "") -> Any:
        """Returns what others left under ``key``, once it is there.

        Raises:
            LaunchError: it is not there in time; ``why`` says what is wrong then.
        """
        until = time.monotonic() + patience.total_seconds()
        while not self._store.check([key]):
            if time.monotonic() > until:
                raise LaunchError(
                    why or f"Nothing came under {key} of the pool's store in {patience.total_seconds():.0f} s.",
                    "look at the other ranks' and servers' output.",
                )
            time.sleep(POLL_S)
        return pickle.loads(self._store.get(key))

    def tell(self, kind: str, content: Any = None) -> None:
        """Leave the next message for servers; the homes' first rank does."""
        with self._telling:
            self.put(f"message/{self._messages}", (kind, content))
            if self._messages >= _KEPT:
                self._store.delete_key(f"message/{self._messages - _KEPT}")
            self._messages += 1

    def hear(self, patience: timedelta) -> tuple[str, Any]:
        """The next message, on a server.

        Raises:
            LaunchError: none comes in time.
        """
        found: tuple[str, Any] = self.take(
            f"message/{self._messages}", patience, "The homes have said nothing for too long: their run has ended."
        )
        self._messages += 1
        return found

    def group(self, name: str, rank: int, size: int) -> dist.ProcessGroup:
        """A gloo group over ranks of several worlds; all of them call it together.

        Args:
            name: of the group, the same on all its ranks.
            rank: this process's, in the group.
            size: how many ranks it has.
        """
        group, _ = c10d._new_process_group_helper(
            size,
            rank,
            [],  # no ranks of the default world, which some of its members are not in
            c10d.Backend("gloo"),
            dist.PrefixStore(name, self._store),
            group_name=c10d.GroupName(f"{self._name}/{name}"),
            timeout=TIMEOUT,
        )
        # By ranks of the default world; the others, of whom some are in other worlds, have no such rank here.
        places = {-1 - place: place for place in range(size) if place != rank}
        c10d._world.pg_group_ranks[group] = {dist.get_rank(): rank} | places
        return group
