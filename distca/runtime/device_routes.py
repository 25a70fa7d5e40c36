"""A rank's routes as tensors on its device, made once per micro-batch and shared by all layers of a kind.

A *plan* says which *server* (a rank that computes attention) computes which *CA-task*: a range of a document's queries
with all their keys. A *route* is one rank's part of a plan: the rows that it sends from its *home* tensors, receives as
a server, and keeps. The planner makes routes in numpy (``distca/plan/routes.py``); :class:`StepRoutes` turns those of a
step into index tensors. ``AttentionCall`` and the transports run them.

Two micro-batch parts, the *nano-batches* ping and pong, take turns, and each has routes of its own. A *kind* of layer
has one window, scale and softcap. A *region* is the copy of a task's keys and values that a kernel reads in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from distca.attention import TaskBatch
from distca.device.host_to_device import Destination, uploading
from distca.plan import AttentionKind, Layout, Links, Plan, Route, Segments, StepPlan, route
from distca.plan.phases import Phase
from distca.runtime.recurrent_routes import RecurrentRoutes
from distca.transport import RowMoves


@dataclass(frozen=True)
class SharedRows:
    """A range of k,v rows in a server's receive buffer, and the copies of it that tasks read.

    The regions of all tasks lie one after the other in one tensor. Example: buffer rows [10, 17) are copied for two
    tasks, rows [10, 14) to row 0 of that tensor, and all seven to row 4. Then ``first`` is 10 and ``places`` are
    (0, 0, 4) and (0, 4, 7).

    Attributes:
        first: first row of the range in the buffer.
        places: for every copy, in task order: its first row counted from ``first``, its first row among the regions,
            and its number of rows. The last copy reaches to the end of the range.
    """

    first: int
    places: list[tuple[int, int, int]]

    @staticmethod
    def of(copies: Segments) -> list[SharedRows]:
        """Groups copies that read overlapping buffer rows into one range each; different ranges do not overlap."""
        found: list[SharedRows] = []
        columns, end = (copies.source.tolist(), copies.destination.tolist(), copies.rows.tolist()), -1
        for source, target, rows in sorted(zip(*columns, strict=True)):
            if source >= end:
                found.append(SharedRows(source, []))
            found[-1].places.append((source - found[-1].first, target, rows))
            end = max(end, source + rows)
        return found


@dataclass(frozen=True)
class KindBatch:
    """Consecutive CA-tasks of one kind of layer: one kernel call.

    Attributes:
        kind: the kind of layer.
        batch: first and last row of each task, counted from this batch's first row.
        q: the batch's rows in the server's query buffer.
        kv: the batch's rows among all regions.
    """

    kind: AttentionKind
    batch: TaskBatch
    q: slice
    kv: slice

    @staticmethod
    def of(route: Route, kinds: Sequence[AttentionKind], device: Destination) -> tuple[KindBatch, ...]:
        """Cuts a route's tasks into one batch for each run of consecutive tasks of one kind."""
        changes = np.flatnonzero(np.diff(route.kind)) + 1
        borders = [0, *changes.tolist(), len(route.kind)]
        return tuple(
            KindBatch(
                kinds[int(route.kind[low])],
                TaskBatch.of(
                    route.cu_q[low : high + 1] - route.cu_q[low], route.cu_kv[low : high + 1] - route.cu_kv[low], device
                ),
                *(slice(int(cu[low]), int(cu[high])) for cu in (route.cu_q, route.cu_kv)),
            )
            for low, high in pairwise(borders)
            if high > low
        )


@dataclass(frozen=True)
class ServerRoute:
    """One rank's route of one plan, as index tensors on its device.

    Attributes:
        q_to_server: moves of q from homes to servers; backward also moves o, lse and dO by them.
        q_to_home: moves of o, lse (log-sum-exp) and dQ back home.
        kv_to_server: moves of k and v to servers. Between nodes they may take two hops: to one server of the node, the
            *gateway*, and from there to the node's other servers.
        kv_to_home: moves of dK and dV back home, which add them up if several servers return the same row.
        repeats: copies from this server's k,v buffer to the regions. It is empty if the buffer itself can serve as the
            regions: no two tasks share rows, and no task needs rows that ping left here.
        before: in pong, copies to the regions from the k,v buffer that this server kept of ping.
        batches: this server's CA-tasks.
        q_rows: rows of the server's query buffer.
        kv_rows: rows of the server's k,v buffer, which holds every row once.
        region_rows: k,v rows of all regions together.
    """

    q_to_server: RowMoves
    q_to_home: RowMoves
    kv_to_server: RowMoves
    kv_to_home: RowMoves
    repeats: list[SharedRows]
    before: list[SharedRows]
    batches: tuple[KindBatch, ...]
    q_rows: int
    kv_rows: int
    region_rows: int

    @cached_property
    def kinds(self) -> str:
        """The names of the kinds in this server's tasks, for the timeline."""
        return " and ".join(dict.fromkeys(each.kind.name for each in self.batches))

    @staticmethod
    def of(route: Route, kinds: Sequence[AttentionKind], device: Destination) -> ServerRoute:
        """Copies a route to ``device`` without blocking the host. ``kinds`` has the kind of each number in the plan."""
        with uploading(device) as upload:
            return ServerRoute(
                *RowMoves.there_and_back(route.q, route.ranks, upload),
                *RowMoves.in_hops(route.kv, route.relay, route.ranks, upload),
                SharedRows.of(route.kv.repeat),
                SharedRows.of(route.kv.before),
                KindBatch.of(route, kinds, upload),
                route.q.destination_rows,
                route.kv.destination_rows,
                int(route.cu_kv[-1]),
            )


@dataclass(frozen=True)
class NanoRoutes:
    """Everything a rank needs to run one nano-batch.

    Attributes:
        q_rows: query rows that this rank has as a home; further rows of a home tensor are padding and stay out.
        prefix: in pong, ranges (first row, one past the last) of ping's home rows whose documents pong continues. Their
            keys and values come ahead of pong's own, and travel again to servers that did not keep them.
        forward: route of the forward plan.
        backward: route of the backward plan; the same object as ``forward`` if both directions have one plan.
    """

    q_rows: int
    prefix: tuple[tuple[int, int], ...]
    forward: ServerRoute
    backward: ServerRoute

    @staticmethod
    def of(
        forward: Plan,
        backward: Plan,
        rank: int,
        kinds: Sequence[AttentionKind],
        device: Destination,
        previous: Layout | None = None,
        links: Links | None = None,
    ) -> NanoRoutes:
        """The routes of ``rank`` for a nano-batch.

        Args:
            forward: the forward plan.
            backward: the backward plan, over the same layout; it may be ``forward`` itself.
            rank: this rank's number in the server pool.
            kinds: kinds of layers, numbered as in the plans.
            device: the rows' device, or an upload to it. With an upload the tensors have no values until it is sent.
            previous: for pong, the layout of ping; None for ping.
            links: which ranks share a node; None if all do.
        """
        layout = forward.layout
        with uploading(device) as upload:
            here = ServerRoute.of(route(forward, rank, links), kinds, upload)
            back = here if backward is forward else ServerRoute.of(route(backward, rank, links), kinds, upload)
        return NanoRoutes(int(layout.q_rows[rank]), tuple(layout.carried_from(previous, rank)), here, back)


LayerRoutes = tuple[NanoRoutes | RecurrentRoutes, ...]
"""A rank's routes of one layer, by nano-batch. A recurrent layer (linear attention, SSM) has
:class:`RecurrentRoutes`."""


@dataclass(frozen=True)
class StepRoutes:
    """One rank's routes of a step, for the layers of its pipeline stage.

    A *phase* is the forward, or the backward, that all stages run at the same time; each stage has one micro-batch in
    it or none. All stages run their i-th layer together, so its plan covers the i-th layers of all stages. If the i-th
    layers of all stages have the same kinds as the j-th ones, both share their routes.

    Attributes:
        own: by micro-batch and layer, the routes of this stage's micro-batches: forward from one phase, backward from
            another.
        served_forward: by forward phase and layer, the routes of phases in which this stage has no micro-batch and only
            serves the others; None for phases with one.
        served_backward: the same for backward phases.
    """

    own: tuple[tuple[LayerRoutes, ...], ...]
    served_forward: tuple[tuple[LayerRoutes, ...] | None, ...]
    served_backward: tuple[tuple[LayerRoutes, ...] | None, ...]

    @staticmethod
    def of(plan: StepPlan, stage: int, rank: int, device: Destination) -> StepRoutes:
        """The routes of data-parallel rank ``rank`` of pipeline stage ``stage``."""
        return StepRoutes._of(plan, plan.options.pool_rank(stage, rank), stage, device)

    @staticmethod
    def of_server(plan: StepPlan, place: int, device: Destination) -> StepRoutes:
        """The routes of a server without a model, a process that only serves; ``place`` is its number in the pool.

        Without pipeline stages they are in ``own``, by micro-batch. With stages they are in the two others, by
        phase."""
        return StepRoutes._of(plan, place, None, device)

    @staticmethod
    def _of(plan: StepPlan, me: int, stage: int | None, device: Destination) -> StepRoutes:
        options = plan.options

        def of_plans(there: Sequence[Plan], back: Sequence[Plan]) -> LayerRoutes:
            before = [None, *(each.layout for each in there)]
            return tuple(
                NanoRoutes.of(one, other, me, options.kinds, device, previous, options.links)
                for one, other, previous in zip(there, back, before, strict=False)
            )

        def routes(there: Phase, back: Phase) -> tuple[LayerRoutes, ...]:
            of_combination = [of_plans(*each) for each in zip(there.by_combination, back.by_combination, strict=True)]
            return tuple(of_combination[number] for number in options.layer_combinations)

        def served(phases: Sequence[Phase]) -> tuple[tuple[LayerRoutes, ...] | None, ...]:
            serves = [stage is None or each.micro_batches[stage] is None for each in phases]
            return tuple(routes(each, each) if idle else None for each, idle in zip(phases, serves, strict=True))

        if stage is None and options.stages > 1:
            return StepRoutes((), served(plan.forward), served(plan.backward))
        at = stage or 0
        own = (
            routes(plan.forward[plan.forward_phase(m, at)], plan.backward[plan.backward_phase(m, at)])
            for m in range(len(plan.layouts))
        )
        if stage is None:
            return StepRoutes(tuple(own), (), ())
        return StepRoutes(tuple(own), served(plan.forward), served(plan.backward))
