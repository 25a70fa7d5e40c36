"""A server without a model: it plans as homes do, from documents' lengths, and serves forward and backward attention.

It has no parameters, no optimizer and no data. The homes' first rank leaves in the pool's store what a server must know
of the model: heads, kinds of layers, and how steps are planned. It leaves each step's lengths there, too. A server
walks the same layers as a home without tokens: its layers do nothing, and autograd gives backward the order that it has
at home.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from distca.attention import AttentionSpec, Kernel, choose_kernel
from distca.cluster.hostname import machine_name
from distca.cluster.interface import LOOPBACK, bind_gloo
from distca.cluster.pool_store import MAY_GO, PoolStore
from distca.cluster.pool_watch import PoolWatch
from distca.cluster.process import Process
from distca.cluster.timeout import TIMEOUT
from distca.device.host_to_device import uploading
from distca.errors import DistcaError, LaunchError, SupportError
from distca.plan import PlanOptions
from distca.plan.step import StepPlan
from distca.plan.step_file import StepInputs
from distca.runtime.device_routes import LayerRoutes, StepRoutes
from distca.runtime.idle_stage import EmptyLayer, serve_backward, serve_forward
from distca.runtime.ping_pong import run_layers
from distca.runtime.server import AttentionPool
from distca.runtime.timeline import Timeline
from distca.transport.breakable import BreakableTransport, is_lost_peer
from distca.transport.collective import nccl_goes_first

logger = logging.getLogger(__name__)

_PLANNED_AHEAD = 3
"""Plans that a server keeps: that of the step that runs, the next one, and one of another loop, such as validation."""
_REMEMBERED = 16
"""Steps whose figures stay in the store. Homes ask for those of some steps, and soon; older ones are dropped."""
FORMING = timedelta(seconds=20)
"""The time in which all homes and servers of a generation, but the first, have to connect. Then the pool changes once
more, without those that did not."""
HOMES_QUIET = timedelta(days=7)
"""The time that homes may send no message, as they evaluate, save, or wait for data. Then the server ends."""


@dataclass(frozen=True)
class PoolTerms:
    """Facts that a server must know of the homes' model.

    Attributes:
        options: how steps are planned.
        spec: core attention of one tensor-parallel rank; its device is the homes'.
        kernel: name of the kernel that homes asked for.
        backward: how backward gets its rows.
    """

    options: PlanOptions
    spec: AttentionSpec
    kernel: str
    backward: Any


@dataclass(frozen=True)
class Comer:
    """A server without a model that offers to serve.

    Attributes:
        number: the number that was given to it.
        machine: name of its machine.
        device: "cuda" or "cpu".
        process: its process.
    """

    number: int
    machine: str
    device: str
    process: Process


@dataclass(frozen=True)
class Generation:
    """The servers of a pool from one change to the next.

    Attributes:
        number: number of the generation, from 0; each has process groups of its own.
        servers: those that serve, in order. With tensor parallelism every ``tp`` of them share a place in the pool, one
            for each rank.
        terms: facts of the homes' model, planned with these servers.
        told: number of the first message to these servers.
    """

    number: int
    servers: tuple[Comer, ...]
    terms: PoolTerms
    told: int


def serve(store: dist.Store, number: int, *, pool: int = 0, patience: timedelta = TIMEOUT) -> int:
    """Serve core attention to homes until they let their servers go; returns how many steps were served.

    A process that sees GPUs serves on its current device, and rows go by NCCL; one without serves on its CPU by gloo.
    It may come while homes train already, also with the number of a server that has died: they take it in before their
    next step.

    Args:
        store: that of the homes' world: a TCPStore at their MASTER_ADDR and MASTER_PORT.
        number: of this server, from 0; numbers are given by whoever starts servers.
        pool: which of the homes' pools, from 0: each of their ``distca.CAD`` with servers makes the next one.
        patience: in which homes must come.

    Raises:
        LaunchError: no homes come, or they have a server of this number.
        SupportError: the homes compute on GPUs and this process has none, or the other way round.
        KernelError: the homes' kernel cannot run here, or is wrong here.
    """
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    nccl_goes_first()
    if not dist.is_initialized():
        bind_gloo(_host(store))
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    meeting = PoolStore(store, pool)
    me = Comer(number, machine_name(), device.type, Process.here())
    if not meeting.has("generation/0"):
        meeting.put(f"server/{number}", me)
    first: Generation = meeting.take(
        "generation/0", patience, "No homes have come that ask for servers without a model."
    )
    check_device(first.terms.spec.device.type, device.type, number)
    kernel = choose_kernel(first.terms.kernel, replace(first.terms.spec, device=device))
    if me not in first.servers:
        meeting.put(f"comer/{meeting.count('comers', 1) - 1}", me)
        answer = meeting.take(f"welcome/{me.process}", HOMES_QUIET)
        if isinstance(answer, str):
            raise LaunchError(answer)
        first = answer
    return _Server(meeting, me, kernel, device).run(first)


def group_name(generation: int, part: int) -> str:
    """The name of the process group of a tensor-parallel rank's pool."""
    return f"{generation}/part/{part}"


def _host(store: dist.Store) -> str:
    """Returns the address of the homes, on whose interface process groups listen."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else LOOPBACK


def check_device(homes: str, own: str, number: int) -> None:
    """Refuse a server on a CPU beside homes on GPUs, and the other way round: no process group connects them.

    Raises:
        SupportError: their kinds of devices differ.
    """
    if homes != own:
        raise SupportError(
            f"Server {number} has device {own}, and the homes compute on {homes}: start all of them on GPUs, "
            "or all on CPUs (CUDA_VISIBLE_DEVICES=)."
        )


@dataclass(frozen=True)
class Served:
    """The facts that a server tells of a step that it has served.

    Attributes:
        seconds: in which its kernels ran, by direction, in the order in which they ran.
        peak: bytes of device memory at most; on CPUs those that the process has now.
    """

    seconds: dict[str, list[float]]
    peak: int


class _Server:
    def __init__(self, store: PoolStore, me: Comer, kernel: Kernel, device: torch.device) -> None:
        self._store, self._me, self._kernel, self._device = store, me, kernel, device
        self._planned: dict[int, Future[tuple[StepPlan, StepRoutes]]] = {}
        self._transport, self._watch = BreakableTransport(goes_on=False), PoolWatch(store, me.process)

    @property
    def _number(self) -> int:
        return self._me.number

    def _join(self, generation: Generation) -> None:
        """Become part of the pool; all its homes and servers do together. Where one of them does not come, homes say
        that the pool changes once more."""
        terms, spec, options = generation.terms, generation.terms.spec, generation.terms.options
        place = generation.servers.index(self._me)
        tp = len(generation.servers) // options.servers
        self._place, self._terms = options.homes + place // tp, terms
        self._layer = EmptyLayer(spec.heads, spec.kv_heads, spec.head_dim, spec.dtype, self._device)
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
        self._pool = AttentionPool(self._transport, self._kernel, Timeline(self._device), terms.backward)
        self._watch.begin(generation.number, self._transport)
        logger.info("Server %d of the pool serves core attention of %d homes.", self._number, options.homes)

    def _leave(self) -> None:
        """Give up the pool, also where it is broken: whoever waits for this server must learn that it is not there."""
        self._watch.end()
        self._transport.give_up()

    def _rejoin(self, number: int) -> bool:
        """Be part of the pool's next generation; returns whether this server is."""
        self._leave()
        self._planned.clear()
        self._store.put(f"here/{number}/{self._number}", self._me)
        generation: Generation = self._store.take(f"generation/{number}", HOMES_QUIET)
        if self._me not in generation.servers:
            return False
        self._join(generation)
        return True

    def run(self, generation: Generation) -> int:
        served = 0
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
                step, lengths, forward_only, zero = content
                found = self._planned.pop(step, None) or thread.submit(self._plan, step, lengths)
                if not self._transport.broken and self._has_served(*found.result(), forward_only, zero):
                    self._tell_served(step)
                    served += 1
                else:  # homes will see it, and change the pool
                    self._store.put(f"served/{step}/{self._number}", None)

    def _has_served(self, plan: StepPlan, routes: StepRoutes, forward_only: bool, zero: float | None) -> bool:
        """Serve a step; False where another rank of the pool was gone. It is recorded where ``zero`` says from when on.

        Raises:
            RuntimeError: this server itself failed.
        """
        if zero is not None and not self._pool.timeline.recording:
            self._pool.timeline.start_recording(zero)
        try:
            self._serve(plan, routes, forward_only)
            if self._device.type in MAY_GO:
                self._transport.came_to_end(self._device)
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            logger.warning("Server %d lost another rank of the pool: %s", self._number, str(error).splitlines()[0])
            error.__traceback__ = None  # its frames hold the group
            self._leave()
            return False
        return True

    def _begin(self) -> None:
        """In the planning thread, before it copies routes to the device."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _tell_served(self, step: int) -> None:
        """Leave what a step took, for homes that ask. It waits for the device: the host runs no step ahead of it."""
        seconds = self._pool.timeline.take_serves()
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            peak = psutil.Process().memory_info().rss
        self._store.put(f"served/{step}/{self._number}", Served(seconds, peak))
        self._store.drop(f"served/{step - _REMEMBERED}/{self._number}")

    def _tell_recorded(self, question: int) -> None:
        """Leave the spans that were recorded, for homes that ask. Those of a pool that was given up are lost."""
        spans = [] if self._transport.broken else self._pool.timeline.take(self._number)
        self._store.put(f"timeline/{question}/{self._number}", spans)

    def _plan(self, step: int, lengths: tuple[Any, ...]) -> tuple[StepPlan, StepRoutes]:
        """The plan of a step, whose fingerprint, or what went wrong, the homes are told."""
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

    def _serve(self, plan: StepPlan, routes: StepRoutes, forward_only: bool) -> None:
        if plan.options.stages == 1:
            for of_layers in routes.own:
                self._serve_micro_batch(of_layers, forward_only)
            return
        for direction, number in plan.order():
            of_phase = (routes.served_forward if direction == "forward" else routes.served_backward)[number]
            assert of_phase is not None
            if direction == "forward":
                serve_forward(self._pool, of_phase, [self._layer] * len(of_phase))
            elif not forward_only:
                serve_backward(self._pool, of_phase, [self._layer] * len(of_phase))

    def _serve_micro_batch(self, routes: Sequence[LayerRoutes], forward_only: bool) -> None:
        """Forward and backward of all layers, as on a home without tokens."""
        options = self._terms.options
        kinds = options.layer_kinds[0] if options.layer_kinds else (0,) * len(routes)
        layers = [_TracedLayer(self._layer, options.kinds[kind].sink) for kind in kinds]
        with torch.set_grad_enabled(not forward_only):
            hidden = [layers[0].hidden() for _ in routes[0]]
            ends = run_layers(layers, hidden, routes, self._pool)
            if not forward_only:
                torch.cat(ends).sum().backward()


class _TracedLayer:
    """A layer without tokens whose nodes are part of autograd's graph, which gives backward its order.

    Args:
        empty: says which rows it would have.
        has_sink: whether the homes' layer has sinks, which they add themselves.
    """

    def __init__(self, empty: EmptyLayer, has_sink: bool) -> None:
        self._empty = empty
        self.sink = torch.zeros(empty.heads, device=empty.device) if has_sink else None

    def hidden(self) -> torch.Tensor:
        """[0, width] what goes into the first layer: q, k and v of no tokens."""
        each = self._empty
        width = each.head_dim * (each.heads + 2 * each.kv_heads)
        return torch.empty(0, width, dtype=each.dtype, device=each.device, requires_grad=True)

    def pre(self, hidden: torch.Tensor, nano: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        each = self._empty
        q, kv = hidden.split((each.heads * each.head_dim, 2 * each.kv_heads * each.head_dim), dim=1)
        return (
            hidden,
            q.reshape(0, each.heads, each.head_dim),
            kv.reshape(0, 2, each.kv_heads, each.head_dim),
        )

    def post(self, o_NHD: torch.Tensor, *residual: torch.Tensor, nano: int) -> torch.Tensor:
        (hidden,) = residual
        o = o_NHD.reshape(0, self._empty.heads * self._empty.head_dim)
        return torch.cat((o, hidden[:, o.shape[1] :]), dim=1)
