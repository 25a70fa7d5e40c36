"""Servers without a model, as homes see them: who they are, the pool's group with them, and what they are told.

The homes' first rank alone talks to them, through the store behind the homes' world (``distca.cluster.pool_store``).
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch.distributed import distributed_c10d as c10d

from distca.cluster.pool_store import MAY_GO, POLL_S, PoolStore
from distca.cluster.pool_watch import PoolWatch
from distca.cluster.timeout import TIMEOUT
from distca.errors import LaunchError, PlanError, SupportError
from distca.plan.step import StepPlan
from distca.plan.step_file import StepInputs
from distca.runtime.attention_server import FORMING, Comer, Generation, PoolTerms, Served, check_device, group_name
from distca.transport.breakable import BreakableTransport

logger = logging.getLogger(__name__)

_HERE_S = 15.0
"""Seconds in which a server that lives answers."""
_TRIES = 5
_pools = count()
"""Numbers of the pools that this process makes; the same on all homes, which make them together."""


def check_with_servers(config: TransformerConfig, recurrent: bool, offload: bool) -> None:
    """Refuse what has not been shown to be right beside servers without a model.

    Args:
        config: Megatron's configuration.
        recurrent: whether layers are recurrent.
        offload: as in :class:`megatron_patches.api.CAD`.

    Raises:
        SupportError: the model has such a thing.
    """
    found = {
        "mixtures of experts": bool(config.num_moe_experts),
        "recurrent layers": recurrent,
        "offload": offload,
        # A step that is thrown away would leave its largest values behind.
        "FP8 with delayed scaling": bool(config.fp8) and config.fp8_recipe == "delayed",
    }
    for what, there in found.items():
        if there:
            raise SupportError(f"Servers without a model have not been shown beside {what}: leave `servers` at 0.")


class RemoteServers:
    """Servers without a model; every home makes one together.

    They may go and come: a *generation* of the pool has the same servers throughout, and process groups of its own.

    Args:
        servers: number of servers, of all tensor-parallel ranks together.
        tp: tensor-parallel ranks, each of which is served by equally many.
        transport: name of the transport that was asked for.
        device: this rank's device.

    Attributes:
        transport: moves rows in this rank's pool of homes, then servers.
        generation: number of the pool's generation.
        numbers: the numbers that the servers of all tensor-parallel ranks were given, in the servers' order.

    Raises:
        SupportError: the number of servers, the transport or a device does not go with them.
        LaunchError: servers do not come.
    """

    def __init__(self, servers: int, tp: int, transport: str, device: torch.device) -> None:
        if servers % tp:
            raise SupportError(
                f"`servers` is {servers}, which {tp} tensor-parallel ranks do not divide: each has servers of its own."
            )
        by = "nccl" if device.type == "cuda" else "gloo"
        if transport not in ("auto", by):
            raise SupportError(
                f"`transport` is {transport!r}, and rows reach servers without a model by {by}: set it to 'auto'."
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
        self.generation = 0
        self._comers: list[Comer] = []  # those that have not been let in
        self._seen = 0
        self._lost: set[int] = set()
        self._released: set[int] = set()
        self.transport, self._watch = BreakableTransport(self._may_change), PoolWatch(self._store)
        weakref.finalize(self, self._watch.stop)
        # What servers and other homes need no more than a host for is asked over gloo, where there is some.
        self._asking = torch.device("cpu") if "gloo" in str(dist.get_backend_config()) else device
        if self._leads:
            # Servers end when this rank has no more use for them, or ends itself.
            weakref.finalize(self, self._store.tell, "end")

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(each.number for each in self._servers)

    @property
    def machines(self) -> list[str]:
        """The machines of those that serve this rank's pool, in order."""
        return [each.machine for each in self._servers[dist.get_rank() % self._tp :: self._tp]]

    def begin(self, terms: PoolTerms) -> None:
        """Form the pool of the first generation; every home and its servers do together."""
        self._put_generation(terms)
        self.transport.use(self._group(TIMEOUT))
        self._begin_watch()

    # A step.

    def announce(self, inputs: StepInputs) -> int:
        """Let servers plan a step too; returns the number by which they know it, 0 on other ranks than the first."""
        if not self._leads:
            return 0
        number = next(self._numbers)
        self._store.tell("plan", (number, _lengths(inputs)))
        return number

    def agree(self, number: int, plan: StepPlan) -> None:
        """Wait until servers have planned step ``number`` alike. One that is gone is not waited for: the step is
        planned again without it.

        Raises:
            PlanError: a server planned otherwise or could not plan; the first rank raises it.
            LaunchError: a server does not answer, and none may go; the first rank raises it.
        """
        if self._leads:
            for each in self._servers:
                key = f"planned/{number}/{each.number}"
                if self._answers(key, each):
                    check_planned(self._store.take(key), each.number, plan.fingerprint)
                elif self._may_change:
                    self._lost.add(each.number)
                else:
                    raise LaunchError(f"Server {each.number} of the pool does not plan.")

    def run(self, number: int, plan: StepPlan, forward_only: bool, zero: float | None) -> None:
        """Let servers serve a step that they were announced as ``number``. They record it where ``zero`` says when the
        homes' recording began."""
        if self._leads:
            # As it was dealt: planned again it would not be dealt anew.
            self._store.tell("run", (number, (plan.lengths, plan.homes, None), forward_only, zero))

    def is_served(self) -> bool:
        """Whether the step that ran had all its servers to the end, on every home; they all ask."""
        return not (self._may_change and self._anywhere(not self.transport.came_to_end(self._device)))

    def served(self, number: int) -> list[Served | None] | None:
        """The seconds and memory that step ``number`` took on each server, which this waits for; None of a server that
        is gone since. None on other ranks than the first."""
        return [self._left(f"served/{number}/{each.number}", each) for each in self._servers] if self._leads else None

    def timelines(self) -> dict[int, list[dict[str, Any]]]:
        """Ends the recording of servers; returns the spans of each, by its number. Empty on other ranks than the
        first."""
        if not self._leads:
            return {}
        number = next(self._numbers)
        self._store.tell("timeline", number)
        return {each.number: self._left(f"timeline/{number}/{each.number}", each) or [] for each in self._servers}

    def _left(self, key: str, server: Comer) -> Any:
        """Returns what a server leaves under ``key``; None where it is gone."""
        return self._store.take(key) if self._answers(key, server) else None

    # Who serves.

    def wants_change(self) -> bool:
        """Whether a server has gone or come since the generation began; every home asks before a step."""
        if not self._may_change:
            return False
        wanted = self.transport.broken
        if self._leads:
            while self._store.count("comers") > self._seen:
                self._comers.append(self._store.take(f"comer/{self._seen}"))
                self._seen += 1
            self._answer_comers()
            complete = len(self._let_in(self._comers)) > 0
            wanted |= complete or bool(self._lost) or any(map(self._is_gone, self._servers))
        return self._anywhere(wanted)

    def let_go(self, number: int) -> None:
        """Go on without a server from the next step on.

        Raises:
            SupportError: servers on such devices have to stay.
        """
        if not self._may_change:
            raise SupportError(f"Servers without a model stay to the end on {self._device.type}: end the run.")
        self._released.add(number)
        self._lost.add(number)

    def change(self, terms_of: Callable[[], PoolTerms]) -> None:
        """Form the pool of the next generation, of the servers that are there; every home calls it together.

        Args:
            terms_of: gives the terms with the servers that :attr:`numbers` then has; every home calls it together.

        Raises:
            LaunchError: pools have failed to form too often.
        """
        for _ in range(_TRIES):
            self._watch.end()
            self.transport.give_up()
            self.generation += 1
            before = self.numbers
            found: list[Any] = [None]
            if self._leads:
                self._store.tell("change", self.generation)
                here = [each for each in self._servers if self._is_here(each)]
                new = self._let_in(self._comers)
                self._comers = [each for each in self._comers if each not in new]
                found = [(self._whole_places(here) + new, new)]
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
        raise LaunchError(f"The pool of homes and servers without a model has failed to form {_TRIES} times.")

    def _is_here(self, server: Comer) -> bool:
        """Whether a server is to be part of the next generation."""
        if server.number in self._released:
            return False
        return self._answers(f"here/{self.generation}/{server.number}", server)

    def _answers(self, key: str, server: Comer) -> bool:
        """Wait until a server has left something under ``key``; returns False where it is gone, or too late."""
        until = time.monotonic() + (_HERE_S if self._may_change else TIMEOUT.total_seconds())
        while not self._store.has(key):
            if (self._may_change and self._is_gone(server)) or time.monotonic() > until:
                return self._store.has(key)
            time.sleep(POLL_S)
        return True

    def _is_gone(self, server: Comer) -> bool:
        """Whether a server's process has ended, or the server gives no sign of life."""
        return self._watch.is_gone(server.process)

    def _begin_watch(self) -> None:
        servers = [each.process for each in self._servers] if self._leads else []
        self._watch.begin(self.generation, self.transport, servers)

    def _whole_places(self, here: list[Comer]) -> list[Comer]:
        """The servers of ``here`` whose place in the pool has one for every tensor-parallel rank."""
        places = [self._servers[at : at + self._tp] for at in range(0, len(self._servers), self._tp)]
        return [each for place in places if all(one in here for one in place) for each in place]

    def _let_in(self, comers: list[Comer]) -> list[Comer]:
        """The first of those who have come, by number, for whole places."""
        some = sorted((each for each in comers if not self._is_gone(each)), key=lambda each: each.number)
        return some[: len(some) // self._tp * self._tp]

    def _answer_comers(self) -> None:
        """Turn away whoever cannot become one of the servers."""
        taken = {each.number for each in self._servers if not self._is_gone(each)}
        for each in list(self._comers):
            wrong = None
            if each.device != self._device.type:
                wrong = f"Server {each.number} has device {each.device}, and the homes compute on {self._device.type}."
            elif each.number in taken:
                wrong = f"The homes have a server {each.number} already: give this one another number."
            if wrong is not None:
                self._comers.remove(each)
                self._store.put(f"welcome/{each.process}", wrong)
            taken.add(each.number)

    def _put_generation(self, terms: PoolTerms, new: Sequence[Comer] = ()) -> None:
        if self._leads:
            made = Generation(self.generation, tuple(self._servers), terms, self._store.told)
            self._store.put(f"generation/{self.generation}", made)
            for each in new:
                self._store.put(f"welcome/{each.process}", made)

    def _group(self, patience: timedelta) -> dist.ProcessGroup:
        rank, homes = dist.get_rank(), dist.get_world_size() // self._tp
        name = group_name(self.generation, rank % self._tp)
        ranks = homes + len(self._servers) // self._tp
        return self._store.group(name, rank // self._tp, ranks, self._device, patience)

    def _anywhere(self, so: bool) -> bool:
        """Whether ``so`` is true on any home."""
        said = torch.tensor([float(so)], device=self._asking)
        dist.all_reduce(said, dist.ReduceOp.MAX)
        return bool(said.item())


def _say(before: Sequence[int], now: Sequence[int]) -> None:
    gone, come = sorted(set(before) - set(now)), sorted(set(now) - set(before))
    if dist.get_rank() == 0:
        for numbers, what in ((gone, "gone"), (come, "there")):
            if numbers:
                logger.warning("Without a model: server %s is %s; the run goes on.", ", ".join(map(str, numbers)), what)


def check_planned(found: int | str, server: int, fingerprint: int) -> None:
    """Check what a server ``found`` in planning: the plan's fingerprint, or what went wrong.

    Raises:
        PlanError: it planned otherwise or could not.
    """
    if isinstance(found, str):
        raise PlanError(f"Server {server} of the pool could not plan a step: {found}")
    if found != fingerprint:
        raise PlanError(
            f"Server {server} of the pool planned a step differently from the homes, so nothing of it was sent: "
            "compare versions of distca and numpy by `distca doctor` on both nodes."
        )


_MISSING = "Server {} of the {} that `servers` asks for has not come: start it with distca.serve()."


def _lengths(inputs: StepInputs) -> tuple[Sequence[Any], Any, Any]:
    return inputs.lengths, inputs.homes, inputs.room
