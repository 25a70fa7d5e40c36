"""The place where homes and servers without a model meet: a store that both reach, and process groups over all of them.

Homes alone are torch.distributed's default world, because Megatron-Core divides all of it among its groups. Servers are
processes with a world of their own. Both know the store behind the homes' world. Under a prefix of it the homes' first
rank leaves messages that servers read one after the other, and each server leaves its answers.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from distca.cluster.timeout import TIMEOUT
from distca.errors import LaunchError

POLL_S = 0.002
"""Seconds between two looks at the store. Nobody waits inside it: its connection is shared by a process's threads."""
EXCHANGE = timedelta(seconds=30)
"""Time in which an exchange of rows over gloo has to end. Gloo does not always tell a rank that waits to send of
connections that its peer has closed, and it would wait for ever. A slower exchange counts as a rank that is gone."""
MAY_GO = ("cpu", "cuda")
"""Kinds of devices on which a server without a model may go or come while homes train."""
_OUTLIVES = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""Variables with which NCCL's group ends what is under way when a rank is gone, but not this process too. torch reads
them when it makes the group."""
_KEPT = 256
"""Messages that the store keeps: by then every server has answered to the older ones."""


class PoolStore:
    """One process's view of the store.

    Args:
        store: that of the homes' world, or another one that all reach.
        pool: number of the pool: the homes of a run may make several, one after the other. "run" is what is about the
            run itself.

    Attributes:
        store: without any prefix.
    """

    def __init__(self, store: dist.Store, pool: int | str = 0) -> None:
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        self._name = f"distca/pool/{pool}"
        self.store = store
        self._store = dist.PrefixStore(self._name, store)
        self._messages = 0
        self._telling = threading.Lock()

    def put(self, key: str, value: Any) -> None:
        """Leave a picklable ``value`` for others."""
        self._store.set(key, pickle.dumps(value))  # type: ignore[arg-type]  # it takes bytes too

    def has(self, key: str) -> bool:
        """Whether something is there under ``key``."""
        return bool(self._store.check([key]))

    def drop(self, key: str) -> None:
        """Take away what is there under ``key``, if anything is."""
        self._store.delete_key(key)

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

    @property
    def told(self) -> int:
        """How many messages were left, or heard, so far."""
        return self._messages

    def hear_from(self, message: int) -> None:
        """Hear message number ``message`` next."""
        self._messages = message

    def count(self, key: str, more: int = 0) -> int:
        """A number that all of them count up; returns what it is then."""
        return int(self._store.add(key, more))

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

    def group(
        self, name: str, rank: int, size: int, device: torch.device, patience: timedelta = TIMEOUT
    ) -> dist.ProcessGroup:
        """A group over ranks of several worlds, whose first collective has run; all of them call it together.

        Args:
            name: of the group, the same on all its ranks.
            rank: this process's, in the group.
            size: how many ranks it has.
            device: of this process: rows of GPUs go by NCCL, of CPUs by gloo.
            patience: in which all must come.

        Raises:
            RuntimeError: one did not.
        """
        with _without_split(), _outliving_ranks():
            group, _ = c10d._new_process_group_helper(
                size,
                rank,
                [],  # no ranks of the default world, which some of its members are not in
                c10d.Backend("nccl" if device.type == "cuda" else "gloo"),
                dist.PrefixStore(name, self._store),
                group_name=c10d.GroupName(f"{self._name}/{name}"),
                timeout=patience,
            )
        # By ranks of the default world; the others, of whom some are in other worlds, have no such rank here.
        places = {-1 - place: place for place in range(size) if place != rank}
        c10d._world.pg_group_ranks[group] = {dist.get_rank(): rank} | places
        # NCCL connects ranks at their first collective: now, and not while others wait for rows.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        exchange = TIMEOUT if device.type == "cuda" else EXCHANGE
        if patience != exchange:
            c10d._set_pg_timeout(exchange, group)
        return group


def break_off(group: dist.ProcessGroup) -> None:
    """Let what is under way in a group end at once, whatever it waits for: NCCL does. Gloo's exchanges end with their
    timeout, or when connections close."""
    if "nccl" in str(dist.get_backend(group)):
        group._get_backend(torch.device("cuda")).abort()  # type: ignore[attr-defined]


def give_up(group: dist.ProcessGroup) -> None:
    """Give up a group, of which a rank may be gone. Gloo's connections close with the last reference to the group, and
    ranks that wait for this one then get an error."""
    if "nccl" in str(dist.get_backend(group)):
        c10d._abort_process_group(group)  # destroying it would wait for other ranks
    else:
        dist.destroy_process_group(group)


@contextmanager
def _outliving_ranks() -> Iterator[None]:
    """Let this process live on when ranks of a group that is made inside are gone."""
    before = {name: os.environ.get(name) for name in _OUTLIVES}
    os.environ.update(_OUTLIVES)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _without_split() -> Iterator[None]:
    """Let NCCL make a communicator of its own: from one whose device is bound it would split ranks off, and servers are
    none of its ranks."""
    world = c10d._get_default_group()
    bound = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound
