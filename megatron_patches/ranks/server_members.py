"""The servers that a home knows: how they join at the start, how they leave, and how others come during a run.

The ranks that train are called *homes*. In this file a *server* is a process without a model, which only computes core
attention for homes. All homes with the same tensor-parallel rank, and their servers, are a *pool*. A pool has a process
group, in which its members exchange rows of q, k, v and outputs.

Homes and servers write messages to each other into a key-value store, which all of them reach. Of the homes only rank 0
reads and writes these, and tells the other homes. At the start:

1. Each server writes who it is, a :class:`Comer`.
2. Rank 0 writes what homes compute. Each server answers with the kernel of core attention that it has chosen.
3. Rank 0 writes the list of servers, and the process groups form.

When a server leaves or another one comes, there is a new list and there are new process groups: a new *generation*. It
has the homes and servers of all tensor-parallel ranks.

``distca/runtime/attention_server.py`` is the servers' side.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from distca.attention import AttentionSpec
from distca.cluster.agreement import of_first_rank, of_ranks
from distca.cluster.health import ends_by
from distca.cluster.pool_store import MAY_GO, POLL_S, PoolStore
from distca.cluster.pool_watch import PoolWatch
from distca.cluster.process import Process
from distca.cluster.timeout import TIMEOUT
from distca.errors import KernelError, LaunchError, SupportError
from distca.plan.cost.table_file import TABLES, find_table, table_name, write_table
from distca.runtime.pool_messages import (
    FORMING,
    Comer,
    Generation,
    KernelAnswer,
    KernelTerms,
    PoolTerms,
    check_device,
    gpu_id,
    group_name,
)
from distca.transport.breakable import BreakableTransport
from megatron_patches.ranks.late_servers import LateServers, servers_are, whole_places
from megatron_patches.steps.unlike_servers import ServerSort
from megatron_patches.support.servers import check_gpus

logger = logging.getLogger(__name__)

_COMING = TIMEOUT - timedelta(seconds=30)
"""The time in which all servers of the start must come. They have the same time once more to choose their kernels, and
once more to measure tables. Other homes wait for rank 0 for ``TIMEOUT`` each time. Rank 0 must give up earlier, so that
it can tell them why."""
_HERE = timedelta(seconds=15)
"""The time that rank 0 waits for a server's answer once the pool has formed. After this time the run goes on without
the answer, or without the server. If ``MAY_GO`` does not name the type of device, servers cannot leave, and rank 0
waits for ``TIMEOUT``."""
_LATE_S = 40.0
"""If a process group has not formed this many seconds after its time limit (``patience``), :func:`ends_by` ends all
homes. In a process without a watcher of ranks (``distca/cluster/health.py``) :func:`ends_by` does nothing. Gloo keeps
to the limit. NCCL waits without end for a member that is lost, or that it cannot reach."""
_TRIES = 5
"""The most attempts to form a generation; then the run ends."""
_TRIES_WITH_NEW = 2
"""The most attempts with servers that come in this change; later attempts leave them out."""
_pools = count()
"""Numbers :class:`ServerMembers` objects in the order of their creation, which is the same on all homes."""


class ServerMembers:
    """A home's view of the servers of all pools; all homes create it together.

    Args:
        servers: number of servers of all tensor-parallel ranks.
        tp: number of tensor-parallel ranks, which have equally many servers.
        transport: what the user set: "auto", or "nccl" on GPUs and "gloo" on CPUs.
        device: the device of this home.

    Attributes:
        transport: moves rows between the members of this rank's pool, in which homes have the first ranks.
        generation: number of the present generation, from 0.
        numbers: the numbers of the present servers of all pools. A server is started with its number. The i-th server
            here serves tensor-parallel rank i % ``tp``.

    Raises:
        SupportError: ``servers`` or ``transport`` has an impossible value; or a server has another type of device than
            homes, or a GPU that :func:`check_gpus` refuses.
        LaunchError: a server did not come in time. All homes raise it.
    """

    def __init__(self, servers: int, tp: int, transport: str, device: torch.device) -> None:
        if servers % tp:
            raise SupportError(
                f"`servers` is {servers}, no multiple of the {tp} tensor-parallel ranks, but each tensor-parallel rank "
                "has servers of its own: set it to a multiple."
            )
        by = "nccl" if device.type == "cuda" else "gloo"
        if transport not in ("auto", by):
            raise SupportError(
                f"`transport` is {transport!r}, but rows reach servers without a model by {by}: set it to 'auto'."
            )
        self._tp, self._device, self._may_change = tp, device, device.type in MAY_GO
        self._leads = dist.get_rank() == 0
        self._store = PoolStore(c10d._get_default_store(), next(_pools))
        self._servers: list[Comer] = of_first_rank(lambda: self._first(servers))
        for each in self._servers:
            check_device(device.type, each.device, each.number)
        self._gpus = of_ranks(gpu_id(device))
        check_gpus(self._servers, tp, self._gpus)
        self.generation = 0
        self._lost: set[int] = set()  # numbers of servers for which a new generation is due
        self._released: set[int] = set()  # the numbers in ``_lost`` of servers that the user let go
        self.transport, self._watch = BreakableTransport(self._may_change), PoolWatch(self._store)
        weakref.finalize(self, self._watch.stop)
        if self._leads:
            self._late = LateServers(self._store, tp, device.type, self._gpus, self._watch)
            self._watch.await_first([each.process for each in self._servers])
        # Homes agree through CPU tensors where there is gloo, so that they do not wait for the GPU.
        self._asking = torch.device("cpu") if "gloo" in str(dist.get_backend_config()) else device
        if self._leads:
            # Servers are told to end when this object is collected, or when this process ends.
            weakref.finalize(self, self._store.tell, "end")

    def _first(self, servers: int) -> list[Comer]:
        """Waits for the servers with which the run begins, and returns them by number."""
        left, found = _until_all_came(), list[Comer]()
        for number in range(servers):
            found.append(self._store.take(f"server/{number}", left(), _MISSING.format(number, servers)))
        return found

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(each.number for each in self._servers)

    @property
    def machines(self) -> list[str]:
        """The machine of each server of this rank's pool."""
        return [each.machine for each in self._servers[dist.get_rank() % self._tp :: self._tp]]

    @property
    def sorts(self) -> list[ServerSort]:
        """The GPU and the kernel of each server, in the order of :attr:`numbers`."""
        return [ServerSort(each.gpu, each.kernel) for each in self._servers]

    @property
    def sharing(self) -> list[int]:
        """For each ``tp`` consecutive servers, the number of servers on the fullest of their GPUs.

        With tp 2, let servers 0 and 1 share a GPU, and 2 and 3 have one each. Then it is [2, 1].
        """
        of_gpu = Counter(map(_device_of, self._servers))
        found = [of_gpu[_device_of(each)] for each in self._servers]
        return [max(found[at : at + self._tp]) for at in range(0, len(found), self._tp)]

    @property
    def device_count(self) -> int:
        """The number of GPUs that the servers have; a server on a CPU counts as one."""
        return len(set(map(_device_of, self._servers)))

    def ask_for_kernels(self, spec: AttentionSpec, kernel: str, tables: Path | None) -> None:
        """Makes each server choose its kernel of core attention, while homes choose theirs.

        Args:
            spec: core attention on this home.
            kernel: the name of a kernel, or "auto".
            tables: a folder of cost tables, which say how long attention takes on a GPU. Servers measure what neither
                the folder nor the package has; with None they measure nothing.
        """
        self._spec, self._tables = spec, tables
        if self._leads:
            self._store.put("kernel", KernelTerms(tuple(self._servers), spec, kernel, tables is not None))

    def hear_kernels(self) -> None:
        """Waits until servers have chosen kernels and measured tables; all homes call it together.

        Raises:
            KernelError: a server has no usable kernel, or not the one that the user named. All homes raise it.
            LaunchError: a server has ended, or does not answer. All homes raise it.
        """
        answers: list[KernelAnswer] = of_first_rank(self._kernels)
        for each, answer in zip(self._servers, answers, strict=True):
            if answer.objection:
                raise KernelError(f"On server {each.number} of the pool: {answer.objection}")
        self._servers = [
            replace(each, kernel=answer.kernel) for each, answer in zip(self._servers, answers, strict=True)
        ]
        if (folder := self._tables) is not None:
            of_first_rank(lambda: self._have_measured(folder))  # other homes wait here for minutes

    def _have_measured(self, folder: Path) -> None:
        """Makes servers measure missing cost tables, one server for each, and writes the tables to ``folder``."""
        spec = self._spec
        heads = (spec.heads, spec.kv_heads, spec.head_dim)
        chosen: dict[ServerSort, Comer] = {}
        for each, sort in zip(self._servers, self.sorts, strict=True):
            found = [find_table(*sort, *heads, value_dim=spec.value_dim, folder=at) for at in (folder, TABLES)]
            if sort not in chosen and found == [None, None]:
                chosen[sort] = each
        for each in self._servers:
            self._store.put(f"measure/{each.process}", each in chosen.values())
        left = _until_all_came()
        for sort, each in chosen.items():
            logger.info("No cost table fits %s: server %d measures one, for about two minutes.", sort, each.number)
            self._answers(f"table/{each.process}", each, left())
            table = self._store.take(f"table/{each.process}", timedelta(0), _NO_TABLE.format(each.number))
            if table is not None:
                write_table(folder / table_name(*sort, *heads, value_dim=spec.value_dim), table)

    def _kernels(self) -> list[KernelAnswer]:
        """Waits for each server's choice of a kernel."""
        left, found = _until_all_came(), list[KernelAnswer]()
        for server in self._servers:
            key = f"kernel/{server.process}"
            self._answers(key, server, left())
            # All the waiting was done above. Without an answer by now, take() must raise at once.
            found.append(self._store.take(key, timedelta(0), _NO_KERNEL.format(server.number)))
        return found

    def begin(self, terms: PoolTerms) -> None:
        """Forms the first generation; all homes call it together.

        Args:
            terms: the facts about the homes' model that servers need.

        Raises:
            LaunchError: a server has ended.
            RuntimeError: a member of the pool does not connect in time.
        """
        self._check_all_live()
        self._put_generation(terms)
        self.transport.use(self._group(TIMEOUT))
        self._begin_watch()

    def _check_all_live(self) -> None:
        """Raises LaunchError on all homes if a server has ended."""
        found: list[Any] = [None]
        if self._leads:
            found = [[each for each in self._servers if self._is_gone(each)]]
        dist.broadcast_object_list(found)
        for each in found[0]:
            raise LaunchError(_ENDED.format(each.number))

    # Later generations.

    def wants_change(self) -> bool:
        """Whether servers have left or new ones can join; all homes call it together before a step."""
        if not self._may_change:
            return False
        wanted = self.transport.broken
        if self._leads:
            self._late.hear(self._servers)
            wanted |= bool(self._late.joining()) or bool(self._lost) or not all(map(self._late.stays, self._servers))
        return self._anywhere(wanted)

    def let_go(self, number: int) -> None:
        """Leaves server ``number`` out of the pool from the next step on.

        With tensor parallelism, the other servers of its group of ``tp`` leave too (:func:`whole_places`).

        Raises:
            SupportError: servers on this type of device have to stay to the end of the run.
        """
        if not self._may_change:
            raise SupportError(f"Servers without a model stay to the end on {self._device.type}: end the run.")
        self._released.add(number)
        self._lost.add(number)

    def change(self, terms_of: Callable[[], PoolTerms]) -> None:
        """Forms the next generation from the servers that are there; all homes call it together.

        Args:
            terms_of: returns the facts about the homes' model that servers need. When it is called, on all homes,
                :attr:`numbers` already has the servers of the new generation.

        Raises:
            LaunchError: the pool has failed to form ``_TRIES`` times.
        """
        before, came = self.numbers, list[Comer]()
        for attempt in range(_TRIES):
            self._watch.end()
            self.transport.give_up()
            self.generation += 1
            found: list[Any] = [None]
            if self._leads:
                self._store.tell("change", self.generation)
                # A new server that others cannot reach must not end the run.
                unfit = came if attempt >= _TRIES_WITH_NEW else []
                stay = [each for each in self._servers if each not in unfit and self._late.stays(each)]
                new = self._late.take() if attempt < _TRIES_WITH_NEW else []
                here = [each for each in stay if self._is_here(each)]
                came += new
                found = [(whole_places(self._servers, self._tp, here.__contains__) + new, new)]
                if attempt == _TRIES_WITH_NEW and came:
                    logger.warning(
                        "Of the servers that came now, %s left out, as the pool did not form with them: "
                        "look at their output, and whether all ranks can reach their machine.",
                        servers_are([each.number for each in came]),
                    )
            dist.broadcast_object_list(found)
            self._servers, new = found[0]
            self._lost.clear()
            self._released.clear()
            self._put_generation(terms_of(), new)
            try:
                self.transport.use(self._group(FORMING))
            except RuntimeError:
                logger.warning("The pool did not form: a member went, or could not be reached.", exc_info=True)
                self.transport.give_up()
            if not self._anywhere(self.transport.broken):
                self._begin_watch()
                _say(before, self.numbers)
                return
        raise LaunchError(
            f"The pool of homes and servers without a model has failed to form {_TRIES} times: look at the "
            "servers' output."
        )

    def _is_here(self, server: Comer) -> bool:
        if server.number in self._released:
            return False
        return self._answers(f"here/{self.generation}/{server.number}", server)

    def _answers(self, key: str, server: Comer, patience: timedelta | None = None) -> bool:
        """Waits until a server has written ``key`` into the store.

        Returns False if the server has ended, or needs longer than ``patience``; None stands for ``_HERE``."""
        usual = _HERE if self._may_change else TIMEOUT
        until = time.monotonic() + (usual if patience is None else patience).total_seconds()
        while not self._store.has(key):
            if (self._may_change and self._is_gone(server)) or time.monotonic() > until:
                return self._store.has(key)
            time.sleep(POLL_S)
        return True

    def _is_gone(self, server: Comer) -> bool:
        return self._watch.is_gone(server.process)

    def _begin_watch(self) -> None:
        servers = [each.process for each in self._servers] if self._leads else []
        self._watch.begin(self.generation, self.transport, servers)

    def _put_generation(self, terms: PoolTerms, new: Sequence[Comer] = ()) -> None:
        """Writes the generation into the store, for servers that stay and for each new server."""
        if self._leads:
            made = Generation(self.generation, tuple(self._servers), terms, self._store.told)
            self._store.put(f"generation/{self.generation}", made)
            for each in new:
                self._store.put(f"welcome/{each.arrival}", made)

    def _group(self, patience: timedelta) -> dist.ProcessGroup:
        """Returns the process group of this rank's pool.

        Raises:
            RuntimeError: a member takes longer than ``patience``.
        """
        rank, homes = dist.get_rank(), dist.get_world_size() // self._tp
        name = group_name(self.generation, rank % self._tp)
        ranks = homes + len(self._servers) // self._tp
        limit = patience.total_seconds() + _LATE_S
        with ends_by(limit, LaunchError(_NOT_FORMED.format(limit), "look at the servers' output.")):
            return self._store.group(name, rank // self._tp, ranks, self._device, patience)

    def _anywhere(self, so: bool) -> bool:
        """Whether ``so`` is True on any home; all homes call it together."""
        said = torch.tensor([float(so)], device=self._asking)
        dist.all_reduce(said, dist.ReduceOp.MAX)
        return bool(said.item())


def _until_all_came() -> Callable[[], timedelta]:
    """Returns a function that returns how much is left of ``_COMING``, a time for all servers that begins now."""
    until = time.monotonic() + _COMING.total_seconds()
    return lambda: timedelta(seconds=max(0.0, until - time.monotonic()))


def _device_of(server: Comer) -> str | Process:
    return server.gpu_id or server.process


def _say(before: Sequence[int], now: Sequence[int]) -> None:
    gone, come = sorted(set(before) - set(now)), sorted(set(now) - set(before))
    if dist.get_rank() == 0:
        for numbers, what in ((gone, "gone"), (come, "there")):
            if numbers:
                logger.warning("Of the servers without a model, %s %s; the run goes on.", servers_are(numbers), what)


_NOT_FORMED = (
    "The pool of homes and servers without a model has not formed in {:.0f} s: a server is lost, or some ranks cannot "
    "reach it over the network."
)
_MISSING = "Server {} of the {} that `servers` asks for has not come: start it with distca.serve()."
_NO_TABLE = (
    "Server {} of the pool has not measured its cost table: it has ended, or does not answer. Look at the server's "
    "output, or measure the table with `distca profile`."
)
_NO_KERNEL = (
    "Server {} of the pool came, but has not chosen a kernel of core attention: it has ended, or does not answer. "
    "Look at the server's output, and start homes and servers again."
)
_ENDED = (
    "Server {} of the pool ended before the pool was formed: look at the server's output, and start homes and servers "
    "again."
)
