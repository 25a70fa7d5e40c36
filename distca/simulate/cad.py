"""Simulates a step with core attention disaggregation (DistCA).

A document's *home* ranks hold its rows and compute its linear layers. *Servers* compute tasks of core attention; every
rank is one. The step's plan says which server computes which rows in each phase, and the order of phases. A phase is
the forward, or the backward, of one micro-batch on each pipeline stage. In a phase two nano-batches, ping and pong,
alternate in the order of ``distca.runtime.ping_pong``; a test compares the two orders. Without ping-pong there is one.
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
from distca.simulate.cad_recurrent import CoreNanoBatch, Recurrent
from distca.simulate.experts import ExpertLayers
from distca.simulate.fabric import Exchange
from distca.simulate.job import Job
from distca.simulate.streams import Arrival, Streams
from distca.simulate.workload import Workload
from distca.sizes.fp8_shapes import rows_multiple


@dataclass(frozen=True)
class Hops:
    """The exchanges of one launch. Between nodes rows go in two hops.

    Attributes:
        first: the exchange that starts at once.
        second: the exchange behind it, in which servers hand received rows on inside their node. On the way back it
            brings home the gradients that such a server has added up. None without a second hop.
    """

    first: Exchange
    second: Exchange | None


@dataclass(frozen=True)
class Names:
    """The names of a nano-batch's actions in a timeline.

    Attributes:
        there: its first exchange.
        serve: the work between the two exchanges.
        back: its second exchange.
        rest: the work of a recurrent layer outside these; empty for attention.
    """

    there: str = "q,k,v"
    serve: str = "serve"
    back: str = "o"
    rest: str = ""


_RECURRENT = {
    "forward": Names("halo", "summarise", "states", "finish"),
    "backward": Names("dstates", "finish", "dhalo", "summarise"),
}


@dataclass(frozen=True)
class NanoBatch:
    """One nano-batch of a phase in one direction. Array legend: R ranks of the pool.

    Attributes:
        rows: [R] home rows, multiplied by the factor by which this home's linear layers are slower.
        attention: [R] seconds of a layer's core attention.
        beside: [R] seconds of copying rows for core attention; in a recurrent layer the work between the exchanges.
        there: the first exchange: rows go to servers.
        back: the second exchange: results return.
        rest: [R] seconds of a recurrent layer after the second exchange, in backward before the first one; else 0.
        names: the names of these actions.
    """

    rows: np.ndarray
    attention: np.ndarray
    beside: np.ndarray
    there: Hops
    back: Hops
    rest: np.ndarray
    names: Names


def planned(job: Job, workload: Workload) -> StepPlan:
    """Returns the step's plan, as training makes it. With ``plan_by_kind`` False all layers have the plan of layers
    without a window."""
    options = PlanOptions(
        ranks=job.data_parallel,
        cost=job.costs[0],
        stages=job.pp,
        nano_batches=job.nano_batches,
        align=rows_multiple(job.fp8, job.tp),
        resend=job.resend,
        tolerance=job.tolerance,
        links=job.links,
        non_attention=job.non_attention,
        servers=job.extra_servers,
        server_gb_s=(job.cluster.slow_network_gb_s,) * (job.extra_servers if job.cluster.slow_gpus else 0),
        recurrent=any(job.recurrent),
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
    """Runs a plan's phases on simulated streams. Array legend: R servers of the pool, over all pipeline stages.

    Args:
        job: the model, the cluster and the parallelism.
        plan: the step's plan.
        streams: the streams of all servers.

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
        self._experts = ExpertLayers(job, streams, np.arange(job.homes) // job.data_parallel)
        self._slower = np.append(job.home_factors or np.ones(job.homes), np.ones(job.extra_servers))
        self._head = np.where(last, job.head, 0.0)
        self._recurrent = Recurrent(job, plan.layouts) if any(job.recurrent) else None

    def run(self) -> None:
        """Runs all phases in order."""
        passed: dict[str, Arrival | None] = {"forward": None, "backward": None}
        for direction, number in self._plan.order():
            phase = self._plan.forward[number] if direction == "forward" else self._plan.backward[number]
            incoming = passed[direction]
            if incoming is not None:
                self._streams.join(incoming)
            batches = self._by_layer(phase, direction)
            busy = np.sum([batch.rows for batch in batches[0]], axis=0) > 0
            self._streams.compute(np.where(busy, self._job.rates.phase_s, 0.0), "phase", direction=direction)
            if direction == "forward":
                self._forward(batches)
            else:
                self._backward(batches)
            passed[direction] = self._pass_on(phase, direction)

    def _by_layer(self, phase: Phase, direction: Direction) -> list[list[NanoBatch]]:
        """Returns for each layer its nano-batches in a phase."""
        by_combination = self._nano_batches(phase, direction)
        combinations = iter(self._kinds.layer_combinations)
        if self._recurrent is None:
            return [by_combination[number] for number in combinations]
        cores = self._recurrent.nano_batches(phase.micro_batches, direction)
        rows = [batch.rows for batch in by_combination[0]]
        recurrent = [self._of_core(*each, direction) for each in zip(rows, cores, strict=True)]
        return [recurrent if one else by_combination[next(combinations)] for one in self._job.recurrent]

    def _of_core(self, rows: np.ndarray, core: CoreNanoBatch, direction: str) -> NanoBatch:
        """Returns a nano-batch of a recurrent layer."""
        there, back = Hops(core.there, None), Hops(core.back, None)
        return NanoBatch(rows, np.zeros_like(core.rest), core.before, there, back, core.rest, _RECURRENT[direction])

    def _nano_batches(self, phase: Phase, direction: Direction) -> list[list[NanoBatch]]:
        """Returns the nano-batches of attention layers, for each combination of kinds that stages run together."""
        found = []
        for number, kinds in enumerate(self._kinds.combinations):
            plans = phase.by_combination[number if self._plan.options.layer_kinds else 0]
            seconds = [self._seconds(plan, phase, kinds, nano, direction) for nano, plan in enumerate(plans)]
            found.append([self._nano_batch(plan, each, direction) for plan, each in zip(plans, seconds, strict=True)])
        return found

    def _seconds(self, plan: Plan, phase: Phase, kinds: Sequence[int], nano: int, direction: Direction) -> np.ndarray:
        """Returns [R] seconds of core attention in a layer that has these ``kinds`` by stage."""
        if not self._plan.options.layer_kinds:  # the plan was made for a single kind
            documents = [0 if m is None else len(self._plan.layouts[m][nano].first) for m in phase.micro_batches]
            kind = np.repeat(np.asarray(kinds, np.int64), documents)
            plan = replace(plan, windows=self._kinds.windows, kind=kind)
        return server_seconds(plan, self._kinds.cost_of_kind, direction) * self._job.rates.attention_factor

    def _nano_batch(self, plan: Plan, seconds: np.ndarray, direction: Direction) -> NanoBatch:
        """Returns a nano-batch of an attention layer whose core attention takes ``seconds`` [R]."""
        job, shape = self._job, self._job.shape
        if id(plan) not in self._traffic:  # forward and backward often share a plan
            self._traffic[id(plan)] = traffic(plan, job.links)
        found = self._traffic[id(plan)]
        # Bytes of a query row and of a key/value row on their way to servers (``out``) and home. The log-sum-exp
        # travels where homes need it: with resend, and in models with sinks, which are added at home.
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
        # Rows that several tasks of a server share are copied; in backward their gradients are added up as well.
        copies = job.copied(kv * copied * (1 if direction == "forward" else 2))
        return NanoBatch(
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
        """Returns an exchange.

        ``parts`` are pairs of rows between ranks and the bytes of such a row. With ``there`` False rows go back."""
        ranks = self._job.servers
        home, server = (np.concatenate([getattr(rows, end) for rows, _ in parts]) for end in ("home", "server"))
        sizes = np.concatenate([rows.rows * size for rows, size in parts])
        key = home * ranks + server
        pairs, number = np.unique(key, return_inverse=True)
        total = np.bincount(number, sizes, len(pairs))
        home, server = np.divmod(pairs, ranks)
        return self._job.fabric.exchange(*((home, server) if there else (server, home)), total)

    def _forward(self, batches: list[list[NanoBatch]]) -> None:
        """Runs the forward of a phase; ``batches`` are the nano-batches of each layer."""
        streams, rows, layers = self._streams, self._job.rows, self._job.layers
        under_way: list[Arrival] = []

        def compute(seconds: np.ndarray, name: str, layer: int, nano: int) -> None:
            streams.compute(seconds, name, layer, nano, "forward")

        def launch(hops: Hops, what: str, layer: int, nano: int) -> Arrival:
            return streams.launch(hops.first, what, layer, nano, "forward", hops.second)

        def join(layer: int, nano: int) -> None:
            batch = batches[layer][nano]
            streams.join(under_way[nano], layer, nano, "forward")
            if batch.names.rest:
                compute(batch.rest, batch.names.rest, layer, nano)

        for nano, batch in enumerate(batches[0]):
            compute(batch.rows * rows[0].pre_forward, "pre", 0, nano)
            under_way.append(launch(batch.there, batch.names.there, 0, nano))
        for layer in range(layers):
            for nano, batch in enumerate(batches[layer]):
                streams.join(under_way[nano], layer, nano, "forward")
                self._serve(batch, layer, nano, "forward")
                under_way[nano] = launch(batch.back, batch.names.back, layer, nano)
            last = layer + 1 == layers

            def behind(nano: int, post: float, name: str, layer: int = layer, last: bool = last) -> None:
                between = post + (0.0 if last else rows[layer + 1].pre_forward)
                if between:
                    compute(batches[layer][nano].rows * between, name, layer, nano)
                if not last:
                    following = batches[layer + 1][nano]
                    under_way[nano] = launch(following.there, following.names.there, layer + 1, nano)

            def before(nano: int, layer: int = layer) -> None:
                join(layer, nano)
                compute(batches[layer][nano].rows * rows[layer].post_forward, "post", layer, nano)

            if layer in self._experts:
                home = [batch.rows for batch in batches[layer]]
                self._experts.run(home, range(len(home)), layer, "forward", before, partial(behind, post=0, name="pre"))
                continue
            for nano in range(len(batches[layer])):
                join(layer, nano)
                behind(nano, rows[layer].post_forward, "post" if last else "post+pre")
        streams.compute(sum(batch.rows for batch in batches[0]) * self._head, "head", layers - 1, 0, "forward")

    def _backward(self, batches: list[list[NanoBatch]]) -> None:
        """Runs the backward of a phase; ``batches`` are the nano-batches of each layer."""
        streams, rows, layers = self._streams, self._job.rows, self._job.layers
        under_way: dict[int, Arrival] = {}
        for layer in reversed(range(layers)):
            last = layer + 1 == layers
            order = list(enumerate(batches[layer]))[::-1]

            def before(nano: int, layer: int = layer, last: bool = last) -> None:
                if not last:
                    streams.join(under_way[nano], layer + 1, nano, "backward")
                    pre = rows[layer + 1].pre_backward
                    streams.compute(batches[layer][nano].rows * pre, "pre", layer, nano, "backward")

            def launch(nano: int, layer: int = layer) -> None:
                batch = batches[layer][nano]
                if batch.names.rest:
                    streams.compute(batch.rest, batch.names.rest, layer, nano, "backward")
                under_way[nano] = self._send_back(batch.there, batch.names.there, layer, nano)

            def behind(nano: int, layer: int = layer, launch: Callable[[int], None] = launch) -> None:
                post = rows[layer].post_backward
                streams.compute(batches[layer][nano].rows * post, "post", layer, nano, "backward")
                launch(nano)

            if layer in self._experts:
                home = [batch.rows for batch in batches[layer]]
                self._experts.run(home, [nano for nano, _ in order], layer, "backward", before, behind)
            else:
                for nano, batch in order:
                    if not last:
                        streams.join(under_way[nano], layer + 1, nano, "backward")
                    between = rows[layer].post_backward + (0.0 if last else rows[layer + 1].pre_backward)
                    streams.compute(batch.rows * between, "post" if last else "post+pre", layer, nano, "backward")
                    launch(nano)
            for nano, batch in order:
                streams.join(under_way[nano], layer, nano, "backward")
                self._serve(batch, layer, nano, "backward")
                under_way[nano] = self._send_back(batch.back, batch.names.back, layer, nano)
        for nano, batch in order:
            streams.join(under_way[nano], 0, nano, "backward")
            streams.compute(batch.rows * rows[0].pre_backward, "pre", 0, nano, "backward")

    def _send_back(self, hops: Hops, what: str, layer: int, nano: int) -> Arrival:
        return self._streams.launch(hops.first, what, layer, nano, "backward", hops.second)

    def _serve(self, batch: NanoBatch, layer: int, nano: int, direction: str) -> None:
        self._streams.compute(batch.beside + batch.attention, batch.names.serve, layer, nano, direction)
        self.attention += batch.attention

    def _pass_on(self, phase: Phase, direction: str) -> Arrival | None:
        """Starts to send a phase's activations to the next stage, or its gradients to the previous one."""
        job, ranks = self._job, self._job.data_parallel
        if job.pp == 1:
            return None
        source = np.arange(job.servers)
        rows = np.sum([plan.layout.q_rows for plan in phase.plans], axis=0)
        target = source + (ranks if direction == "forward" else -ranks)
        some = (source < job.homes) & (target >= 0) & (target < job.homes)
        size = job.residual_bytes(rows)
        exchange = job.fabric.exchange(source[some], target[some], size[some])
        return self._streams.launch(exchange, "activations" if direction == "forward" else "gradients")
