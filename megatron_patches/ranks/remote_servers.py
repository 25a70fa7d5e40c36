"""The training ranks' side of servers without a model, which are processes that only compute core attention.

The ranks that train are called *homes*. In this file a *server* is always a server without a model. A *pool* is all
homes with the same tensor-parallel rank, and their servers. Each pool has a process group in which homes and servers
exchange rows of q, k, v and outputs. A *plan* says which member of the pool computes which part of a step's core
attention. Homes and servers make the same plan, each by itself, from documents' lengths.

Rank 0 of the homes writes orders into a key-value store. All servers read all orders, and write answers into the store.
Servers may leave during a run and others may join. Each change makes a new *generation* of the pool, with a new process
group.

``distca/runtime/attention_server.py`` is the servers' side.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch.distributed import distributed_c10d as c10d

from distca.attention import AttentionSpec
from distca.cluster.agreement import of_ranks
from distca.cluster.pool_store import MAY_GO, POLL_S, PoolStore
from distca.cluster.pool_watch import PoolWatch
from distca.cluster.timeout import TIMEOUT
from distca.errors import KernelError, LaunchError, PlanError, SupportError
from distca.plan.cost.table_file import TABLES, find_table, table_name, write_table
from distca.plan.step import StepPlan
from distca.plan.step_file import StepInputs
from distca.runtime.attention_server import (
    FORMING,
    Comer,
    Generation,
    KernelAnswer,
    KernelTerms,
    PoolTerms,
    Served,
    check_device,
    gpu_id,
    group_name,
)
from distca.transport.breakable import BreakableTransport
from megatron_patches.steps.unlike_servers import ServerSort

logger = logging.getLogger(__name__)

_HERE = timedelta(seconds=15)
"""The time that homes wait for a server's answer where servers may leave (on devices in ``MAY_GO``). After this time
the run goes on without the server."""
_TRIES = 5
"""The most attempts to form a pool after a change; then the run ends."""
_TRIES_WITH_NEW = 2
"""The most attempts with servers that came during the run; then the pool is formed without them."""
_pools = count()
"""Numbers :class:`RemoteServers` objects in the order of their creation, which is the same on all homes."""


def check_with_servers(config: TransformerConfig, offload: bool) -> None:
    """Refuses models and settings that are not supported beside servers without a model.

    Raises:
        SupportError: inputs of layers are offloaded, or there is FP8 with delayed scaling.
    """
    found = {
        "offload": offload,
        # A step runs again if a server leaves during it. Delayed scaling would count the largest values of both runs.
        "FP8 with delayed scaling": bool(config.fp8) and config.fp8_recipe == "delayed",
    }
    for what, there in found.items():
        if there:
            raise SupportError(
                f"Servers without a model have not been shown to be right with {what}: leave `servers` at 0."
            )


def _check_gpus(servers: Sequence[Comer], tp: int, of_homes: Collection[str] = ()) -> None:
    """Refuses a server on a home's GPU, and two servers on one GPU that serve the same tensor-parallel rank.

    Args:
        servers: all servers in the pool's order; ``servers[i]`` serves tensor-parallel rank i % ``tp``.
        tp: number of tensor-parallel ranks.
        of_homes: identities of the homes' GPUs; "" for a CPU.

    Raises:
        SupportError: a server is refused; the message names the first.
    """
    for tp_rank in range(tp):
        first: dict[str, int] = {}
        for each in servers[tp_rank::tp]:
            if each.gpu_id and each.gpu_id in of_homes:
                raise SupportError(
                    f"Server {each.number} of the pool is on the GPU of a rank with a model: start it on another GPU "
                    "(LOCAL_RANK, CUDA_VISIBLE_DEVICES)."
                )
            if each.gpu_id and first.setdefault(each.gpu_id, each.number) != each.number:
                may = f"let at most {tp} servers with consecutive numbers share a GPU"
                raise SupportError(
                    f"Servers {first[each.gpu_id]} and {each.number} of the pool share a GPU and serve the same "
                    "tensor-parallel rank, but NCCL takes one process of a group on each GPU: "
                    f"{may if tp > 1 else 'start each on its own'}."
                )


class RemoteServers:
    """A home's access to the servers; all homes create this object together.

    Args:
        servers: number of servers, over all tensor-parallel ranks.
        tp: number of tensor-parallel ranks; each has the same number of servers.
        transport: the transport that the user named: "auto", or "nccl" on GPUs and "gloo" on CPUs.
        device: the device of this home.

    Attributes:
        transport: moves rows between the members of this rank's pool. Homes have its first ranks, servers the others.
        generation: number of the pool's generation, from 0.
        numbers: the numbers of the present servers, in the pool's order. A server gets its number when it is started.
            The server at place i of the order serves tensor-parallel rank i % ``tp``.

    Raises:
        SupportError: the number of servers, the transport or a server's device is not possible.
        LaunchError: a server did not start in time.
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
        self._store, self._numbers = PoolStore(c10d._get_default_store(), next(_pools)), count(1)
        found: list[Any] = [None]
        if self._leads:
            found = [
                [self._store.take(f"server/{each}", why=_MISSING.format(each, servers)) for each in range(servers)]
            ]
        dist.broadcast_object_list(found)
        self._servers: list[Comer] = found[0]
        for each in self._servers:
            check_device(device.type, each.device, each.number)
        self._gpus = of_ranks(gpu_id(device))
        _check_gpus(self._servers, tp, self._gpus)
        self.generation = 0
        self._comers: list[Comer] = []  # servers that came during the run and are not in the pool yet
        self._seen = 0  # how many servers have come during the run
        self._lost: set[int] = set()  # numbers of servers that are to leave the pool
        self._released: set[int] = set()  # the numbers in ``_lost`` of servers that the user let go
        self.transport, self._watch = BreakableTransport(self._may_change), PoolWatch(self._store)
        weakref.finalize(self, self._watch.stop)
        if self._leads:
            self._watch.await_first([each.process for each in self._servers])
        # Homes agree through CPU tensors where there is gloo, so that they do not wait for the GPU.
        self._asking = torch.device("cpu") if "gloo" in str(dist.get_backend_config()) else device
        if self._leads:
            # Servers are told to end when this object is collected, or when this process ends.
            weakref.finalize(self, self._store.tell, "end")

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(each.number for each in self._servers)

    @property
    def machines(self) -> list[str]:
        """The names of the machines on which this tensor-parallel rank's servers run, in the servers' order."""
        return [each.machine for each in self._servers[dist.get_rank() % self._tp :: self._tp]]

    @property
    def sorts(self) -> list[ServerSort]:
        """The GPUs and kernels of all servers, in the servers' order."""
        return [ServerSort(each.gpu, each.kernel) for each in self._servers]

    @property
    def sharing(self) -> list[int]:
        """[servers / tp] for each ``tp`` consecutive servers, the number of servers on the fullest of their GPUs.

        Example for tp 2: servers 0 and 1 share a GPU, servers 2 and 3 have one each. The result is [2, 1].
        """
        of_gpu = Counter(each.gpu_id or each.process for each in self._servers)
        found = [of_gpu[each.gpu_id or each.process] for each in self._servers]
        return [max(found[at : at + self._tp]) for at in range(0, len(found), self._tp)]

    def ask_for_kernels(self, spec: AttentionSpec, kernel: str, tables: Path | None) -> None:
        """Makes servers choose their kernels, each by itself, while homes choose theirs.

        Args:
            spec: core attention on this home.
            kernel: the name of a kernel, or "auto".
            tables: a folder of cost tables. Servers measure tables that neither it nor the package has. None measures
                none.
        """
        self._spec, self._tables = spec, tables
        if self._leads:
            self._store.put("kernel", KernelTerms(tuple(self._servers), spec, kernel, tables is not None))

    def hear_kernels(self) -> None:
        """Waits for the names of all servers' kernels, and for tables that servers measure; all homes call it together.

        Raises:
            KernelError: a server has no usable kernel, or not the one that the user named. All homes raise it.
            LaunchError: a server has ended, or does not answer.
        """
        found: list[Any] = [None]
        if self._leads:
            found = [[self._kernel_of(each) for each in self._servers]]
        dist.broadcast_object_list(found)
        answers: list[KernelAnswer] = found[0]
        for each, answer in zip(self._servers, answers, strict=True):
            if answer.objection:
                raise KernelError(f"On server {each.number} of the pool: {answer.objection}")
        self._servers = [
            replace(each, kernel=answer.kernel) for each, answer in zip(self._servers, answers, strict=True)
        ]
        if self._leads and self._tables is not None:
            self._have_measured(self._tables)
        if self._tables is not None:
            dist.barrier()  # a table takes minutes

    def _have_measured(self, folder: Path) -> None:
        """Makes one server measure each cost table that is missing, and writes the tables to ``folder``."""
        spec = self._spec
        heads = (spec.heads, spec.kv_heads, spec.head_dim)
        chosen: dict[ServerSort, Comer] = {}
        for each, sort in zip(self._servers, self.sorts, strict=True):
            found = [find_table(*sort, *heads, value_dim=spec.value_dim, folder=at) for at in (folder, TABLES)]
            if sort not in chosen and found == [None, None]:
                chosen[sort] = each
        for each in self._servers:
            self._store.put(f"measure/{each.process}", each in chosen.values())
        for sort, each in chosen.items():
            logger.info("No cost table fits %s: server %d measures one, for about two minutes.", sort, each.number)
            self._answers(f"table/{each.process}", each, TIMEOUT)
            table = self._store.take(f"table/{each.process}", timedelta(0), _NO_TABLE.format(each.number))
            if table is not None:
                write_table(folder / table_name(*sort, *heads, value_dim=spec.value_dim), table)

    def _kernel_of(self, server: Comer) -> KernelAnswer:
        key = f"kernel/{server.process}"
        self._answers(key, server, TIMEOUT)  # of a server that has ended nobody waits for the rest of the time
        found: KernelAnswer = self._store.take(key, timedelta(0), _NO_KERNEL.format(server.number))
        return found

    def begin(self, terms: PoolTerms) -> None:
        """Forms the process group of the first generation, together with all homes and servers.

        ``terms`` are the facts about the homes' model that servers need.
        """
        self._check_all_live()
        self._put_generation(terms)
        self.transport.use(self._group(TIMEOUT))
        self._begin_watch()

    def _check_all_live(self) -> None:
        """Raises LaunchError on all homes if a server has ended before the first generation."""
        found: list[Any] = [None]
        if self._leads:
            found = [[each for each in self._servers if self._is_gone(each)]]
        dist.broadcast_object_list(found)
        for each in found[0]:
            raise LaunchError(_ENDED.format(each.number))

    # A step.

    def announce(self, inputs: StepInputs) -> int:
        """Makes servers plan a step, and returns a number for the step, which later orders to servers name.

        Ranks other than 0 do nothing and return 0.
        """
        if not self._leads:
            return 0
        number = next(self._numbers)
        self._store.tell("plan", (number, _lengths(inputs)))
        return number

    def agree(self, number: int, plan: StepPlan) -> None:
        """On rank 0 waits until all servers have planned step ``number``, and compares their plans with ``plan``.

        On devices on which servers may leave, a missing answer is no error: the step is later planned again without the
        server.

        Raises:
            PlanError: a server has another plan or could not plan.
            LaunchError: a server does not answer, on a device on which servers have to stay.
        """
        if self._leads:
            for each in self._servers:
                key = f"planned/{number}/{each.number}"
                if self._answers(key, each):
                    check_planned(self._store.take(key), each.number, plan.fingerprint)
                elif self._may_change:
                    self._lost.add(each.number)
                else:
                    raise LaunchError(f"Server {each.number} of the pool does not plan: look at the server's output.")

    def run(self, number: int, plan: StepPlan, forward_only: bool, zero: float | None) -> None:
        """Makes servers compute their part of a step.

        Args:
            number: from :meth:`announce`.
            plan: the homes' plan of the step.
            forward_only: whether to leave out backward.
            zero: the time from which homes record a timeline, in seconds since 1970; None if they record none. Servers
                record if homes do.
        """
        if self._leads:
            # A server that has dropped its plan makes it anew from these lengths. None in place of ``StepInputs.room``
            # leaves documents in the micro-batches into which the first planning moved them.
            self._store.tell("run", (number, (plan.lengths, plan.homes, None), forward_only, zero))

    def is_served(self) -> bool:
        """Whether all exchanges of the step that just ran have succeeded; all homes call it together."""
        return not (self._may_change and self._anywhere(not self.transport.came_to_end(self._device)))

    def served(self, number: int) -> list[Served | None] | None:
        """Waits for the servers' reports on step ``number``, and returns them in the servers' order.

        The report of a server that has left is None. On ranks other than 0 the result is None.
        """
        return [self._answer(f"served/{number}/{each.number}", each) for each in self._servers] if self._leads else None

    def timelines(self) -> dict[int, list[dict[str, Any]]]:
        """Ends the servers' timelines and returns them by server number; empty on ranks other than 0."""
        if not self._leads:
            return {}
        number = next(self._numbers)
        self._store.tell("timeline", number)
        return {each.number: self._answer(f"timeline/{number}/{each.number}", each) or [] for each in self._servers}

    def _answer(self, key: str, server: Comer) -> Any:
        """Waits for a server's answer under ``key`` in the store. Returns None if the server has left."""
        return self._store.take(key) if self._answers(key, server) else None

    # Changes of the servers.

    def wants_change(self) -> bool:
        """Whether servers have left or new ones can join; all homes call it together before a step."""
        if not self._may_change:
            return False
        wanted = self.transport.broken
        if self._leads:
            new = self._store.count("comers") > self._seen
            while self._store.count("comers") > self._seen:
                self._comers.append(self._store.take(f"comer/{self._seen}"))
                self._seen += 1
            self._answer_comers()
            joining = self._let_in(self._comers)
            waiting = [each.number for each in self._comers if each not in joining]
            if new and waiting:
                logger.warning(
                    "Of the servers without a model, %s waiting, as servers join %d at a time, one for each "
                    "tensor-parallel rank.",
                    *(_servers(waiting), self._tp),
                )
            wanted |= bool(joining) or bool(self._lost) or any(map(self._is_gone, self._servers))
        return self._anywhere(wanted)

    def let_go(self, number: int) -> None:
        """Leaves server ``number`` out of the pool from the next step on.

        Raises:
            SupportError: servers on this type of device have to stay to the end of the run.
        """
        if not self._may_change:
            raise SupportError(f"Servers without a model stay to the end on {self._device.type}: end the run.")
        self._released.add(number)
        self._lost.add(number)

    def change(self, terms_of: Callable[[], PoolTerms]) -> None:
        """Forms the next generation of the pool, from the servers that are there; all homes call it together.

        Args:
            terms_of: returns the facts about the homes' model that servers need. All homes call it together, when
                :attr:`numbers` already names the servers of the new generation.

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
                here = [each for each in self._servers if each not in unfit and self._is_here(each)]
                new = self._let_in(self._comers) if attempt < _TRIES_WITH_NEW else []
                came += new
                self._comers = [each for each in self._comers if each not in new]
                found = [(self._whole_places(here) + new, new)]
                if attempt == _TRIES_WITH_NEW and came:
                    logger.warning(
                        "Of the servers that came during the run, %s left out, as the pool did not form with them: "
                        "look at their output, and whether all ranks can reach their machine.",
                        _servers([each.number for each in came]),
                    )
            dist.broadcast_object_list(found)
            self._servers, new = found[0]
            self._lost.clear()
            self._released.clear()
            self._put_generation(terms_of(), new)
            try:
                self.transport.use(self._group(FORMING))
            except RuntimeError:
                logger.warning("A server went while the pool was formed.", exc_info=True)
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
        """Waits until ``key`` is in the store; returns False if the server has left or takes longer than
        ``patience``."""
        usual = _HERE if self._may_change else TIMEOUT
        until = time.monotonic() + (patience or usual).total_seconds()
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

    def _whole_places(self, here: list[Comer]) -> list[Comer]:
        """Returns the servers that can stay.

        A place is ``tp`` consecutive servers, one for each tensor-parallel rank. The servers of a place stay only if
        all of them are in ``here``.
        """
        places = [self._servers[at : at + self._tp] for at in range(0, len(self._servers), self._tp)]
        return [each for place in places if all(one in here for one in place) for each in place]

    def _let_in(self, comers: list[Comer]) -> list[Comer]:
        """Returns the new servers that can join, sorted by number. Their count is a multiple of ``tp``."""
        some = sorted((each for each in comers if not self._is_gone(each)), key=lambda each: each.number)
        return some[: len(some) // self._tp * self._tp]

    def _answer_comers(self) -> None:
        """Refuses new servers on another kind of device or a taken GPU, or with the number of another server."""
        taken = {each.number for each in self._servers if not self._is_gone(each)}
        for each in list(self._comers):
            wrong = None
            if each.device != self._device.type:
                wrong = f"Server {each.number} has device {each.device}, and the homes compute on {self._device.type}."
            elif each.number in taken:
                wrong = f"The homes have a server {each.number} already: give this one another number."
            if wrong is not None:
                self._refuse([each], wrong)
            taken.add(each.number)
        self._refuse_shared_gpus()

    def _refuse_shared_gpus(self) -> None:
        """Refuses new servers on GPUs that :func:`_check_gpus` refuses: no process group with them could form."""
        stay = self._whole_places([each for each in self._servers if not self._is_gone(each)])
        joining = self._let_in(self._comers)
        for at in range(0, len(joining), self._tp):
            place = joining[at : at + self._tp]
            try:
                _check_gpus([*stay, *place], self._tp, self._gpus)
            except SupportError as error:
                self._refuse(place, str(error))
            else:
                stay += place

    def _refuse(self, comers: Sequence[Comer], why: str) -> None:
        for each in comers:
            self._comers.remove(each)
            self._store.put(f"welcome/{each.process}", why)

    def _put_generation(self, terms: PoolTerms, new: Sequence[Comer] = ()) -> None:
        """Writes the generation to the store: once for the servers that stay, and for each new server under its own
        key."""
        if self._leads:
            made = Generation(self.generation, tuple(self._servers), terms, self._store.told)
            self._store.put(f"generation/{self.generation}", made)
            for each in new:
                self._store.put(f"welcome/{each.process}", made)

    def _group(self, patience: timedelta) -> dist.ProcessGroup:
        """Returns the process group of this rank's pool.

        Raises:
            RuntimeError: a member takes longer than ``patience``.
        """
        rank, homes = dist.get_rank(), dist.get_world_size() // self._tp
        name = group_name(self.generation, rank % self._tp)
        ranks = homes + len(self._servers) // self._tp
        return self._store.group(name, rank // self._tp, ranks, self._device, patience)

    def _anywhere(self, so: bool) -> bool:
        """Whether ``so`` is True on any home; all homes call it together."""
        said = torch.tensor([float(so)], device=self._asking)
        dist.all_reduce(said, dist.ReduceOp.MAX)
        return bool(said.item())


def _say(before: Sequence[int], now: Sequence[int]) -> None:
    gone, come = sorted(set(before) - set(now)), sorted(set(now) - set(before))
    if dist.get_rank() == 0:
        for numbers, what in ((gone, "gone"), (come, "there")):
            if numbers:
                logger.warning("Of the servers without a model, %s %s; the run goes on.", _servers(numbers), what)


def _servers(numbers: Sequence[int]) -> str:
    """Returns a part of a sentence: "server 0 is" or "servers 0, 1 are"."""
    return f"server {numbers[0]} is" if len(numbers) == 1 else f"servers {', '.join(map(str, numbers))} are"


def check_planned(found: int | str, server: int, fingerprint: int) -> None:
    """Refuses a server's plan that differs from the homes' plan.

    Args:
        found: the fingerprint of the server's plan, or the text of the error if the server could not plan.
        server: the server's number.
        fingerprint: the fingerprint of the homes' plan.

    Raises:
        PlanError: the fingerprints differ, or the server could not plan.
    """
    if isinstance(found, str):
        raise PlanError(f"Server {server} of the pool could not plan a step: {found}")
    if found != fingerprint:
        raise PlanError(
            f"Server {server} of the pool planned a step differently from the ranks that train, so the step was not "
            "run: compare versions of distca and numpy by `distca doctor` on both nodes."
        )


_MISSING = "Server {} of the {} that `servers` asks for has not come: start it with distca.serve()."
_NO_TABLE = "Server {} of the pool has not measured its cost table: measure it with `distca profile`."
_NO_KERNEL = (
    "Server {} of the pool came, but has not chosen a kernel of core attention: it has ended, or does not answer. "
    "Look at the server's output, and start homes and servers again."
)
_ENDED = (
    "Server {} of the pool ended before the pool was formed: look at the server's output, and start homes and servers "
    "again."
)


def _lengths(inputs: StepInputs) -> tuple[Sequence[Any], Any, Any]:
    """Returns the inputs of a plan without the options, which servers have already."""
    return inputs.lengths, inputs.homes, inputs.room
