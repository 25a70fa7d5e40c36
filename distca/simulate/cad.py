"""A step with core attention disaggregation: the project's plan, in the project's order, over simulated streams.

``distca.plan.step`` says which rank computes what in which phase and in which order phases run; the order inside a
phase is that of ``distca.runtime.ping_pong`` (a test holds both against each other).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from distca.plan import (
    Direction,
    PairRows,
    Plan,
    PlanOptions,
    StepPlan,
    Traffic,
    context_rows,
    plan_step,
    server_seconds,
    traffic,
)
from distca.plan.phases import Phase
from distca.simulate.experts import ExpertLayers
from distca.simulate.fabric import Exchange
from distca.simulate.job import VALUE, Job
from distca.simulate.recurrent import CoreHalf, Recurrent
from distca.simulate.streams import Arrival, Streams
from distca.simulate.workload import Workload
from distca.sizes.fp8_shapes import rows_multiple


@dataclass(frozen=True)
class Hops:
    """The exchanges that are launched at once.

    Attributes:
        first: what travels at once.
        second: what servers hand on, or send home when others' rows were added; None where nothing is.
    """

    first: Exchange
    second: Exchange | None


@dataclass(frozen=True)
class Names:
    """The names in a timeline: of a nano-batch's first exchange, the work behind it, its second exchange, and the
    rest."""

    there: str = "q,k,v"
    serve: str = "serve"
    back: str = "o"
    rest: str = ""


_RECURRENT = {
    "forward": Names("halo", "summarise", "states", "finish"),
    "backward": Names("dstates", "finish", "dhalo", "summarise"),
}


@dataclass(frozen=True)
class Half:
    """One nano-batch of a phase in one direction. Array legend: R ranks of the pool.

    Attributes:
        rows: [R] home rows, as many times as their linear layers take longer than on other homes.
        attention: [R] seconds of core attention of a layer.
        beside: [R] seconds of putting rows together for it; of a recurrent layer its core up to the second exchange.
        there: rows that servers compute with, in one hop or two; of a recurrent layer its first exchange.
        back: what they return; of a recurrent layer its second exchange.
        rest: [R] seconds of a recurrent core behind the second exchange, in backward before the first; else 0.
        names: for the timeline.
    """

    rows: np.ndarray
    attention: np.ndarray
    beside: np.ndarray
    there: Hops
    back: Hops
    rest: np.ndarray
    names: Names


def planned(job: Job, workload: Workload) -> StepPlan:
    """The step's plan, as training makes it; with ``plan_by_kind`` False that of layers without a window alone."""
    options = PlanOptions(
        ranks=job.data_parallel,
        cost=job.costs[0],
        stages=job.pp,
        nano_batches=2,
        align=rows_multiple(job.fp8, job.tp),
        resend=job.resend,
        tolerance=job.tolerance,
        links=job.links,
        non_attention=job.non_attention,
        servers=job.extra_servers,
        server_gb_s=job.cluster.slow_network_gb_s if job.cluster.slow_gpus else 0.0,
    )
    homes = [each.rank_of for each in workload.micro_batches] if workload.whole else None
    room = None
    if job.deal and homes is None:
        room = [job.data_parallel * job.tokens_per_rank] * len(workload.micro_batches)
    if job.plan_by_kind:
        options = _with_kinds(options, job)
    return plan_step([each.lengths for each in workload.micro_batches], options, homes, room)


def _with_kinds(options: PlanOptions, job: Job) -> PlanOptions:
    return replace(options, kinds=job.kinds, costs=job.costs, layer_kinds=job.layer_kinds)


class Cad:
    """Runs a plan's phases.

    Args:
        job: what runs.
        plan: of the step.
        streams: of the pool's ranks.

    Attributes:
        attention: [R] seconds of core attention so far.
    """

    def __init__(self, job: Job, plan: StepPlan, streams: Streams) -> None:
        self._job, self._plan, self._streams = job, plan, streams
        self._resend = plan.options.resend
        self._kinds = _with_kinds(plan.options, job)
        self._traffic: dict[int, Traffic] = {}
        ranks = job.servers
        self.attention = np.zeros(ranks)
        last = np.arange(ranks) // job.data_parallel == job.pp - 1
        self._experts = ExpertLayers(job, streams, np.minimum(np.arange(ranks) // job.data_parallel, job.pp - 1))
        self._slower = np.append(job.home_factors or np.ones(job.homes), np.ones(job.extra_servers))
        self._head = np.where(last, job.head, 0.0)
        self._recurrent = Recurrent(job, plan.layouts) if any(job.recurrent) else None

    def run(self) -> None:
        """All phases in order."""
        passed: dict[str, Arrival | None] = {"forward": None, "backward": None}
        for direction, number in self._plan.order():
            phase = self._plan.forward[number] if direction == "forward" else self._plan.backward[number]
            incoming = passed[direction]
            if incoming is not None:
                self._streams.join(incoming)
            halves = self._by_layer(phase, direction)
            busy = np.sum([half.rows for half in halves[0]], axis=0) > 0
            self._streams.compute(np.where(busy, self._job.rates.phase_s, 0.0), "phase", direction=direction)
            if direction == "forward":
                self._forward(halves)
            else:
                self._backward(halves)
            passed[direction] = self._pass_on(phase, direction)

    def _by_layer(self, phase: Phase, direction: Direction) -> list[list[Half]]:
        """Returns the nano-batches of each layer."""
        by_combination = self._halves(phase, direction)
        combinations = iter(self._kinds.layer_combinations)
        if self._recurrent is None:
            return [by_combination[number] for number in combinations]
        cores = self._recurrent.halves(phase.micro_batches, direction)
        rows = [half.rows for half in by_combination[0]]
        recurrent = [self._of_core(*each, direction) for each in zip(rows, cores, strict=True)]
        return [recurrent if one else by_combination[next(combinations)] for one in self._job.recurrent]

    def _of_core(self, rows: np.ndarray, core: CoreHalf, direction: str) -> Half:
        there, back = Hops(core.there, None), Hops(core.back, None)
        return Half(rows, np.zeros_like(core.rest), core.before, there, back, core.rest, _RECURRENT[direction])

    def _halves(self, phase: Phase, direction: Direction) -> list[list[Half]]:
        """Returns the nano-batches of a layer with attention, for each combination of the stages' kinds."""
        found = []
        for number, kinds in enumerate(self._kinds.combinations):
            plans = phase.by_combination[number if self._plan.options.layer_kinds else 0]
            seconds = [self._seconds(plan, phase, kinds, nano, direction) for nano, plan in enumerate(plans)]
            found.append([self._half(plan, each, direction) for plan, each in zip(plans, seconds, strict=True)])
        return found

    def _seconds(self, plan: Plan, phase: Phase, kinds: Sequence[int], nano: int, direction: Direction) -> np.ndarray:
        """[R] seconds of core attention of a layer whose stages have these ``kinds``."""
        if not self._plan.options.layer_kinds:  # a plan that knows one kind
            documents = [0 if m is None else len(self._plan.layouts[m][nano].first) for m in phase.micro_batches]
            kind = np.repeat(np.asarray(kinds, np.int64), documents)
            plan = replace(plan, windows=self._kinds.windows, kind=kind)
        return server_seconds(plan, self._kinds.cost_of_kind, direction) * self._job.rates.attention_factor

    def _half(self, plan: Plan, seconds: np.ndarray, direction: Direction) -> Half:
        job, shape = self._job, self._job.shape
        if id(plan) not in self._traffic:  # forward and backward often share a plan
            self._traffic[id(plan)] = traffic(plan, job.links)
        found = self._traffic[id(plan)]
        # Sinks are added at home, so that log-sum-exp travels with keep too.
        q, o, kv = shape.q_bytes, shape.o_bytes, shape.kv_bytes
        lse = job.lse_bytes if self._resend or job.model.sinks else 0
        names = Names() if direction == "forward" else Names("dO", back="dq,dk,dv")
        if direction == "forward":
            out, home = (q, kv), (o + lse, 0)
        elif self._resend:
            out, home, names = (q + 2 * o + lse, kv), (q, kv), replace(names, there="q,k,v,o,dO")
        else:
            out, home = (o + lse, 0), (q, kv)
        tasks, ranks = plan.tasks, job.servers
        q_rows = np.bincount(tasks.server, tasks.stop - tasks.start, ranks)
        kept, copied = context_rows(plan)
        # Backward of shared rows: copies, and gradients added up.
        copies = job.copied(kv * copied * (1 if direction == "forward" else 2))
        return Half(
            plan.layout.q_rows * self._slower,
            seconds,
            job.copied(q_rows * (out[0] + home[0]) + kept * (out[1] + home[1])) + copies,
            self._hops(found, out, there=True),
            self._hops(found, home, there=False),
            np.zeros(ranks),
            names,
        )

    def _hops(self, rows: Traffic, size: tuple[int, int], there: bool) -> Hops:
        q, kv, relay = (
            (pairs, each) for pairs, each in zip((rows.q, rows.kv, rows.relay), (*size, size[1]), strict=True)
        )
        if not relay[0].total or not size[1]:
            return Hops(self._exchange([q, kv], there), None)
        first, second = ([q, kv], [relay]) if there else ([q, relay], [kv])
        return Hops(self._exchange(first, there), self._exchange(second, there))

    def _exchange(self, parts: list[tuple[PairRows, int]], there: bool) -> Exchange:
        """Rows of so many bytes each."""
        ranks = self._job.servers
        home, server = (np.concatenate([getattr(rows, end) for rows, _ in parts]) for end in ("home", "server"))
        sizes = np.concatenate([rows.rows * size for rows, size in parts])
        key = home * ranks + server
        pairs, number = np.unique(key, return_inverse=True)
        total = np.bincount(number, sizes, len(pairs))
        home, server = np.divmod(pairs, ranks)
        return self._job.fabric.exchange(*((home, server) if there else (server, home)), total)

    def _forward(self, halves: list[list[Half]]) -> None:
        """``halves``: by layer."""
        streams, rows, layers = self._streams, self._job.rows, self._job.layers
        under_way: list[Arrival] = []

        def compute(seconds: np.ndarray, name: str, layer: int, nano: int) -> None:
            streams.compute(seconds, name, layer, nano, "forward")

        def launch(hops: Hops, what: str, layer: int, nano: int) -> Arrival:
            return streams.launch(hops.first, what, layer, nano, "forward", hops.second)

        def join(layer: int, nano: int) -> None:
            half = halves[layer][nano]
            streams.join(under_way[nano], layer, nano, "forward")
            if half.names.rest:
                compute(half.rest, half.names.rest, layer, nano)

        for nano, half in enumerate(halves[0]):
            compute(half.rows * rows[0].pre_forward, "pre", 0, nano)
            under_way.append(launch(half.there, half.names.there, 0, nano))
        for layer in range(layers):
            for nano, half in enumerate(halves[layer]):
                streams.join(under_way[nano], layer, nano, "forward")
                self._serve(half, layer, nano, "forward")
                under_way[nano] = launch(half.back, half.names.back, layer, nano)
            last = layer + 1 == layers

            def behind(nano: int, post: float, name: str, layer: int = layer, last: bool = last) -> None:
                between = post + (0.0 if last else rows[layer + 1].pre_forward)
                if between:
                    compute(halves[layer][nano].rows * between, name, layer, nano)
                if not last:
                    following = halves[layer + 1][nano]
                    under_way[nano] = launch(following.there, following.names.there, layer + 1, nano)

            def before(nano: int, layer: int = layer) -> None:
                join(layer, nano)
                compute(halves[layer][nano].rows * rows[layer].post_forward, "post", layer, nano)

            if layer in self._experts:
                home = [half.rows for half in halves[layer]]
                self._experts.run(home, range(len(home)), layer, "forward", before, partial(behind, post=0, name="pre"))
                continue
            for nano in range(len(halves[layer])):
                join(layer, nano)
                behind(nano, rows[layer].post_forward, "post" if last else "post+pre")
        streams.compute(sum(half.rows for half in halves[0]) * self._head, "head", layers - 1, 0, "forward")

    def _backward(self, halves: list[list[Half]]) -> None:
        streams, rows, layers = self._streams, self._job.rows, self._job.layers
        under_way: dict[int, Arrival] = {}
        for layer in reversed(range(layers)):
            last = layer + 1 == layers
            order = list(enumerate(halves[layer]))[::-1]

            def before(nano: int, layer: int = layer, last: bool = last) -> None:
                if not last:
                    streams.join(under_way[nano], layer + 1, nano, "backward")
                    pre = rows[layer + 1].pre_backward
                    streams.compute(halves[layer][nano].rows * pre, "pre", layer, nano, "backward")

            def launch(nano: int, layer: int = layer) -> None:
                half = halves[layer][nano]
                if half.names.rest:
                    streams.compute(half.rest, half.names.rest, layer, nano, "backward")
                under_way[nano] = self._send_back(half.there, half.names.there, layer, nano)

            def behind(nano: int, layer: int = layer, launch: Callable[[int], None] = launch) -> None:
                post = rows[layer].post_backward
                streams.compute(halves[layer][nano].rows * post, "post", layer, nano, "backward")
                launch(nano)

            if layer in self._experts:
                home = [half.rows for half in halves[layer]]
                self._experts.run(home, [nano for nano, _ in order], layer, "backward", before, behind)
            else:
                for nano, half in order:
                    if not last:
                        streams.join(under_way[nano], layer + 1, nano, "backward")
                    between = rows[layer].post_backward + (0.0 if last else rows[layer + 1].pre_backward)
                    streams.compute(half.rows * between, "post" if last else "post+pre", layer, nano, "backward")
                    launch(nano)
            for nano, half in order:
                streams.join(under_way[nano], layer, nano, "backward")
                self._serve(half, layer, nano, "backward")
                under_way[nano] = self._send_back(half.back, half.names.back, layer, nano)
        for nano, half in order:
            streams.join(under_way[nano], 0, nano, "backward")
            streams.compute(half.rows * rows[0].pre_backward, "pre", 0, nano, "backward")

    def _send_back(self, hops: Hops, what: str, layer: int, nano: int) -> Arrival:
        return self._streams.launch(hops.first, what, layer, nano, "backward", hops.second)

    def _serve(self, half: Half, layer: int, nano: int, direction: str) -> None:
        self._streams.compute(half.beside + half.attention, half.names.serve, layer, nano, direction)
        self.attention += half.attention

    def _pass_on(self, phase: Phase, direction: str) -> Arrival | None:
        """Send what a phase ends with to the next stage, or the previous one."""
        job, ranks = self._job, self._job.data_parallel
        if job.pp == 1:
            return None
        source = np.arange(job.servers)
        rows = np.sum([plan.layout.q_rows for plan in phase.plans], axis=0)
        target = source + (ranks if direction == "forward" else -ranks)
        some = (source < job.homes) & (target >= 0) & (target < job.homes)
        size = rows * job.model.hidden * VALUE / job.tp
        exchange = job.fabric.exchange(source[some], target[some], size[some])
        return self._streams.launch(exchange, "activations" if direction == "forward" else "gradients")
