"""The key-value store and the process groups that connect the ranks of a run with servers without a model.

Ranks that train are called homes; servers without a model compute core attention for them. Homes alone are
torch.distributed's default world, because Megatron-Core divides that whole world among its groups. Each server has a
world of its own. All of them reach the store behind the homes' world. Under a prefix of that store the homes' first
rank writes messages, which servers read one after the other, and servers write answers.
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
"""Seconds between two looks at the store. A waiting call of the store would block its connection for all threads of the
process."""
EXCHANGE = timedelta(seconds=30)
"""The time in which an exchange of rows over gloo has to end; after it the other rank counts as gone. A rank that waits
to send does not always learn from gloo that the connection was closed, and would wait forever."""
MAY_GO = ("cpu", "cuda")
"""The types of devices on which servers without a model may go and come during a run."""
_OUTLIVES = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""Environment variables by which a lost rank ends NCCL's operations, but not this process. torch reads them when it
creates a group."""
_KEPT = 256
"""The number of latest messages that the store keeps. All servers have answered to older ones by then."""


class PoolStore:
    """One process's access to the store.

    Args:
        store: the store of the homes' world, or another one that homes and servers reach.
        pool: the number of a pool, as homes of a run may create several pools one after the other. "run" is for
            messages about the run itself.

    Attributes:
        store: the store without a prefix.
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
        """Writes a value, which can be pickled, for other processes."""
        self._store.set(key, pickle.dumps(value))  # type: ignore[arg-type]  # it takes bytes too

    def has(self, key: str) -> bool:
        """Whether the store has a value under ``key``."""
        return bool(self._store.check([key]))

    def drop(self, key: str) -> None:
        """Deletes the value under ``key``, if there is one."""
        self._store.delete_key(key)

    def take(self, key: str, patience: timedelta = TIMEOUT, why: str = "") -> Any:
        """Waits for the value under ``key`` and returns it; the value stays in the store.

        Args:
            key: the key.
            patience: the longest time to wait.
            why: the message if no value comes in time; empty for a general one.

        Raises:
            LaunchError: no value comes in time.
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
        """Writes the next message for servers; only the homes' first rank calls it."""
        with self._telling:
            self.put(f"message/{self._messages}", (kind, content))
            if self._messages >= _KEPT:
                self._store.delete_key(f"message/{self._messages - _KEPT}")
            self._messages += 1

    @property
    def told(self) -> int:
        """The number of messages so far: written on the homes' first rank, read on a server."""
        return self._messages

    def hear_from(self, message: int) -> None:
        """Makes ``message`` the number of the next message that this server reads."""
        self._messages = message

    def count(self, key: str, more: int = 0) -> int:
        """Adds ``more`` to a number that all processes share; returns the sum."""
        return int(self._store.add(key, more))

    def hear(self, patience: timedelta) -> tuple[str, Any]:
        """Waits for the next message on a server; returns its kind and content.

        Raises:
            LaunchError: no message comes in time.
        """
        found: tuple[str, Any] = self.take(
            f"message/{self._messages}", patience, "The homes have said nothing for too long: their run has ended."
        )
        self._messages += 1
        return found

    def group(
        self, name: str, rank: int, size: int, device: torch.device, patience: timedelta = TIMEOUT
    ) -> dist.ProcessGroup:
        """Returns a process group over homes and servers, which are in different worlds; all members call it together.

        Its first collective has run, so that all members are connected.

        Args:
            name: the group's name, the same on all members.
            rank: this process's rank in the group.
            size: number of ranks in the group.
            device: this process's device; the group uses NCCL on GPUs and gloo on CPUs.
            patience: the time in which all members have to connect.

        Raises:
            RuntimeError: a member did not connect.
        """
        with _without_split(), _outliving_ranks():
            group, _ = c10d._new_process_group_helper(
                size,
                rank,
                [],  # the members are not all in the default world, so they have no ranks there
                c10d.Backend("nccl" if device.type == "cuda" else "gloo"),
                dist.PrefixStore(name, self._store),
                group_name=c10d.GroupName(f"{self._name}/{name}"),
                timeout=patience,
            )
        # torch maps ranks of the default world to ranks of the group. Members in other worlds get negative numbers.
        places = {-1 - place: place for place in range(size) if place != rank}
        c10d._world.pg_group_ranks[group] = {dist.get_rank(): rank} | places
        # NCCL connects ranks at the first collective. It runs now, so that no rank waits for it in a step.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        exchange = TIMEOUT if device.type == "cuda" else EXCHANGE
        if patience != exchange:
            c10d._set_pg_timeout(exchange, group)
        return group


def break_off(group: dist.ProcessGroup) -> None:
    """Ends the operations of a group that are under way, also if they wait for a lost rank. This works for NCCL.

    Operations of gloo end with their timeout, or when connections are closed."""
    if "nccl" in str(dist.get_backend(group)):
        group._get_backend(torch.device("cuda")).abort()  # type: ignore[attr-defined]


def give_up(group: dist.ProcessGroup) -> None:
    """Closes a group in which a rank may be gone. Ranks that wait for this one then get an error.

    Connections of gloo are closed when the last reference to the group goes."""
    if "nccl" in str(dist.get_backend(group)):
        c10d._abort_process_group(group)  # destroy_process_group would wait for other ranks
    else:
        dist.destroy_process_group(group)


@contextmanager
def _outliving_ranks() -> Iterator[None]:
    """Sets the variables of ``_OUTLIVES`` while a group is created, so that this process outlives the group's ranks."""
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
    """Makes NCCL create a new communicator for a group.

    If the default group is bound to a device, torch splits the group's ranks off from it. Servers are not in it."""
    world = c10d._get_default_group()
    bound = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound
