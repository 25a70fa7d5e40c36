"""A server without a model: a process that only computes attention for the ranks that train.

- homes: the ranks that train.
- pool: homes and servers together.
- store: the torch.distributed store through which homes and servers exchange messages.
- generation: the pool while its members stay the same. Each generation has its own process groups.

For each step, homes write the lengths of the documents to the store. From the lengths, homes and servers make the same
plan, which says where the attention of each token is computed. A server has 0 tokens of its own. It still runs a
stand-in for every layer with attention, so that its exchanges come in the same order as on homes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from distca.attention import AttentionSpec, Kernel, choose_kernel
from distca.cluster.interface import LOOPBACK, bind_gloo
from distca.cluster.pool_store import MAY_GO, PoolStore
from distca.cluster.pool_watch import PoolWatch
from distca.cluster.process import Process, machine_name
from distca.cluster.timeout import TIMEOUT
from distca.device.host_to_device import uploading
from distca.errors import DistcaError, KernelError, RefusedServerError, SupportError
from distca.plan.step import StepPlan
from distca.plan.step_file import StepInputs
from distca.runtime.device_routes import StepRoutes
from distca.runtime.empty_layers import EmptyLayer, serve_step
from distca.runtime.pool_messages import (
    FORMING,
    Comer,
    Generation,
    KernelAnswer,
    KernelTerms,
    Served,
    check_device,
    gpu_id,
    group_name,
)
from distca.runtime.server import AttentionPool
from distca.runtime.timeline import Timeline
from distca.transport.breakable import BreakableTransport, is_lost_peer
from distca.transport.collective import nccl_goes_first

logger = logging.getLogger(__name__)

_PLANNED_AHEAD = 3
"""The most plans that a server holds: for this training step, the next one, and a validation step. A fourth plan
replaces the oldest. A step whose plan was replaced is planned again."""
_REMEMBERED = 16
"""The number of latest runs of steps whose reports (:class:`Served`) stay in the store. Older reports are deleted."""
HOMES_QUIET = timedelta(days=7)
"""The longest time without a message from homes. After it, the server raises LaunchError."""


Measure = Callable[[Kernel, AttentionSpec], dict[str, Any]]
"""Measures the seconds of attention tasks by a kernel, and returns the content of a cost table's file."""


def serve(
    store: dist.Store, number: int, *, pool: int = 0, patience: timedelta = TIMEOUT, measure: Measure | None = None
) -> int:
    """Serves core attention until homes end the pool or leave this server out; returns the number of served steps.

    A server computes on the current GPU, or without GPUs on the CPU. It may start while homes train; homes then add it
    before a later step. A process that was left out or refused may call this function again.

    Args:
        store: the homes' store, a TCPStore at MASTER_ADDR and MASTER_PORT of the homes.
        number: this server's number, from 0. Servers have different numbers; a new one may take a dead one's number.
        pool: number of the pool, from 0. The training script's first ``distca.CAD`` with servers has pool 0.
        patience: the longest wait until homes come, and then for each of their messages before the first generation.
        measure: measures a cost table that homes lack, before the first generation; None measures none.

    Raises:
        LaunchError: homes keep this server waiting for more than ``patience``, or later for ``HOMES_QUIET``.
        SupportError: homes compute on GPUs and this process on a CPU, or the reverse.
        KernelError: the kernel that homes name cannot run in this process, or computes wrong results.
        RefusedServerError: this server came while homes train, and cannot join: its number or its GPU is taken, homes
            compute on another type of device, or its kernel fails.
        RuntimeError: a process of the first generation does not connect, or this server fails in a step.
    """
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    nccl_goes_first()
    if not dist.is_initialized():
        bind_gloo(_host(store))
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    meeting = PoolStore(store, pool)
    name = torch.cuda.get_device_name() if gpu else "cpu"
    me = Comer(number, machine_name(), device.type, name, Process.here(), gpu_id=gpu_id(device))
    watch = PoolWatch(meeting, me.process)  # from now on homes learn if this process ends
    try:
        return _serve(meeting, me, device, watch, patience, measure)
    finally:
        watch.stop()


def _serve(
    meeting: PoolStore, me: Comer, device: torch.device, watch: PoolWatch, patience: timedelta, measure: Measure | None
) -> int:
    if not meeting.has("generation/0"):
        meeting.put(f"server/{me.number}", me)
    asked: KernelTerms = meeting.take("kernel", patience, "No homes have come that ask for servers without a model.")
    # An answer of this process in the store is from an earlier call of serve(). Homes then left the process out or
    # refused it.
    joins_later = me not in asked.servers or meeting.has(f"kernel/{me.process}")
    try:
        check_device(asked.spec.device.type, device.type, me.number)
        kernel = choose_kernel(asked.kernel, replace(asked.spec, device=device))
    except Exception as error:
        expected = isinstance(error, SupportError | KernelError)
        why = str(error) if expected else f"the choice of a kernel failed: {error!r}."
        if joins_later:
            raise RefusedServerError(why) from error
        meeting.put(f"kernel/{me.process}", KernelAnswer("", why))
        raise
    me = replace(me, kernel=kernel.name)
    if not joins_later:
        meeting.put(f"kernel/{me.process}", KernelAnswer(kernel.name))
        if asked.measures and meeting.take(f"measure/{me.process}", patience):
            meeting.put(f"table/{me.process}", measure(kernel, replace(asked.spec, device=device)) if measure else None)
    first: Generation = meeting.take("generation/0", patience)
    if joins_later:
        # The homes have begun without this process, which now asks to join the next generation. Homes may still answer
        # what the process asked in an earlier call of serve(). That answer has another arrival in its key.
        me = replace(me, arrival=meeting.count("comers", 1) - 1)
        meeting.put(f"comer/{me.arrival}", me)
        answer = meeting.take(f"welcome/{me.arrival}", HOMES_QUIET)
        meeting.drop(f"welcome/{me.arrival}")
        if isinstance(answer, str):
            raise RefusedServerError(answer)
        first = answer
    return _Server(meeting, me, kernel, device, watch).run(first)


def _host(store: dist.Store) -> str:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else LOOPBACK


class _Server:
    def __init__(self, store: PoolStore, me: Comer, kernel: Kernel, device: torch.device, watch: PoolWatch) -> None:
        self._store, self._me, self._kernel, self._device, self._watch = store, me, kernel, device, watch
        self._planned: dict[int, Future[tuple[StepPlan, StepRoutes]]] = {}
        self._transport = BreakableTransport(goes_on=False)
        self._timeline = Timeline(device)

    @property
    def _number(self) -> int:
        return self._me.number

    def _join(self, generation: Generation) -> None:
        """Joins a generation.

        If a process of a later generation does not connect, the call returns, and homes announce another generation.

        Raises:
            RuntimeError: a process of the first generation does not connect.
        """
        terms, spec, options = generation.terms, generation.terms.spec, generation.terms.options
        place = generation.servers.index(self._me)
        tp = len(generation.servers) // options.servers
        self._place, self._terms = options.homes + place // tp, terms
        self._layer = EmptyLayer(
            spec.heads, spec.kv_heads, spec.head_dim, spec.dtype, self._device, value_dim=spec.value_dim
        )
        name = group_name(generation.number, place % tp)
        self._store.hear_from(generation.told)
        patience = FORMING if generation.number else TIMEOUT
        try:
            group = self._store.group(name, self._place, options.pool_ranks, self._device, patience)
        except RuntimeError:
            if not generation.number:
                raise
            logger.warning("The pool did not form.", exc_info=True)
            return
        self._transport.use(group)
        self._pool = AttentionPool(self._transport, self._kernel, self._timeline, terms.backward)
        self._watch.begin(generation.number, self._transport)
        logger.info("Server %d of the pool serves core attention of %d homes.", self._number, options.homes)

    def _leave(self) -> None:
        self._watch.end()
        self._transport.give_up()

    def _rejoin(self, number: int) -> bool:
        """Leaves the generation and joins the generation ``number``; returns False if homes leave this server out."""
        self._leave()
        self._planned.clear()
        self._store.put(f"here/{number}/{self._number}", self._me)
        generation: Generation = self._store.take(f"generation/{number}", HOMES_QUIET)
        if self._me not in generation.servers:
            return False
        self._join(generation)
        return True

    def run(self, generation: Generation) -> int:
        """Handles the homes' messages until "end", or until homes leave this server out; returns the number of steps.

        | message | action |
        |---|---|
        | plan | plans a coming step in the background thread |
        | change | joins the next generation |
        | timeline | writes the recorded spans to the store |
        | run | serves a step |
        """
        served = 0
        self._timeline = Timeline(self._device, generation.terms.layers)  # one for all generations
        self._join(generation)
        with ThreadPoolExecutor(1, "distca-plan", initializer=self._begin) as thread:
            while True:
                kind, content = self._store.hear(HOMES_QUIET)
                if kind == "end":
                    return served
                if kind == "change":
                    if not self._rejoin(content):
                        return served
                    continue
                if kind == "plan":
                    step, lengths = content
                    self._planned[step] = thread.submit(self._plan, step, lengths)
                    for old in list(self._planned)[:-_PLANNED_AHEAD]:
                        del self._planned[old]
                    continue
                if kind == "timeline":
                    self._tell_recorded(content)
                    continue
                step, run, lengths, forward_only, zero = content
                found = self._planned.pop(step, None) or thread.submit(self._plan, step, lengths)
                if not self._transport.broken and self._has_served(*found.result(), forward_only, zero):
                    self._tell_served(step, run)
                    served += 1
                else:  # None tells homes to start another generation.
                    self._store.put(f"served/{run}/{self._number}", None)

    def _has_served(self, plan: StepPlan, routes: StepRoutes, forward_only: bool, zero: float | None) -> bool:
        """Serves a step; returns False if another process of the pool is gone.

        ``zero`` is when homes began to record a timeline, in seconds since 1970; None if homes record none.

        Raises:
            RuntimeError: this server itself failed.
        """
        if zero is not None and not self._timeline.recording:
            self._timeline.start_recording(zero)
        try:
            serve_step(self._pool, self._layer, plan, routes, forward_only)
            if self._device.type in MAY_GO:
                self._transport.came_to_end(self._device)
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            logger.warning("Server %d lost another rank of the pool: %s", self._number, str(error).splitlines()[0])
            error.__traceback__ = None  # its frames would keep the group's connections open
            self._leave()
            self._timeline.take_serves()  # the step is repeated, and its seconds count once
            return False
        return True

    def _begin(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _tell_served(self, step: int, run: int) -> None:
        seconds = self._timeline.take_serves()
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            peak = psutil.Process().memory_info().rss
        self._store.put(f"served/{run}/{self._number}", Served(seconds, peak))
        self._store.drop(f"served/{run - _REMEMBERED}/{self._number}")
        self._store.drop(f"planned/{step}/{self._number}")  # homes compared plans before the step

    def _tell_recorded(self, question: int) -> None:
        self._store.put(f"timeline/{question}/{self._number}", self._timeline.take(self._number))

    def _plan(self, step: int, lengths: tuple[Any, ...]) -> tuple[StepPlan, StepRoutes]:
        try:
            plan = StepInputs(lengths[0], self._terms.options, *lengths[1:]).plan()
            with uploading(self._device) as upload:
                routes = StepRoutes.of_server(plan, self._place, upload)
        except Exception as error:
            said = str(error) if isinstance(error, DistcaError) else repr(error)
            self._store.put(f"planned/{step}/{self._number}", said)
            raise
        self._store.put(f"planned/{step}/{self._number}", plan.fingerprint)
        return plan, routes
