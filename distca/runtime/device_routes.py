"""A rank's routes as tensors on its device, made once per micro-batch and used by all layers."""

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
    """A range of rows in a server's buffer, and its copies in the regions of the tasks that read rows of it.

    Example: buffer rows [10, 17) are copied for two tasks, rows [10, 14) to region row 0, and all to region row 4. Then
    ``first`` is 10 and ``places`` are (0, 0, 4) and (0, 4, 7).

    Attributes:
        first: first row of the range.
        places: (first row within the range, first row of the region, rows) of every copy, in task order; the last one
            reaches to the end of the range.
    """

    first: int
    places: list[tuple[int, int, int]]

    @staticmethod
    def of(copies: Segments) -> list[SharedRows]:
        """Returns ranges such that copies of different ranges do not overlap in the buffer."""
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
    """CA-tasks of one kind of layer that follow each other in a server's buffers.

    Attributes:
        kind: the kind of layer.
        batch: borders of the tasks, counted from the first task's rows.
        q: the query rows of these tasks in the server's buffer.
        kv: the key/value rows of these tasks among all regions.
    """

    kind: AttentionKind
    batch: TaskBatch
    q: slice
    kv: slice

    @staticmethod
    def of(route: Route, kinds: Sequence[AttentionKind], device: Destination) -> tuple[KindBatch, ...]:
        """All tasks of a route, a batch for each run of tasks of one kind."""
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
    """A route ready to run.

    Attributes:
        q_to_server: query rows (also o and dO in backward) from home ranks to servers.
        q_to_home: o, log-sum-exp and dQ rows back home.
        kv_to_server: key/value rows to servers, in one hop or two.
        kv_to_home: dK and dV rows back home, added up where several servers return the same row.
        repeats: rows of the server's k,v buffer and their copies in the tasks' regions. Empty where no two tasks share
            rows, and none have rows from the nano-batch before.
        before: rows of the server's k,v buffer of the nano-batch before, and their copies.
        batches: this server's CA-tasks, a batch for each run of tasks of one kind of layer.
        q_rows: query rows in the server's buffer.
        kv_rows: key/value rows in the server's buffer, which holds every row once.
        region_rows: key/value rows of all tasks' regions.
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
        """The names of the kinds of layers that this server has tasks of."""
        return " and ".join(dict.fromkeys(each.kind.name for each in self.batches))

    @staticmethod
    def of(route: Route, kinds: Sequence[AttentionKind], device: Destination) -> ServerRoute:
        """Brings a route to ``device``, without blocking the host; ``kinds`` of layers are numbered as in the route's
        plan."""
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
        q_rows: query rows that live on this rank; rows of a home tensor beyond them are padding and take no part.
        prefix: (first row, one past the last) of the previous nano-batch's rows whose keys and values this one needs
            again, one range after the other.
        forward: route of the forward plan.
        backward: route of the backward plan; it is ``forward`` where gradients are computed by the forward's servers.
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
            rank: this rank in the server pool.
            kinds: kinds of layers, numbered as in the plans.
            device: where the rows live, or an upload to it; then the routes are ready once the upload was sent.
            previous: layout of the nano-batch before, if this is the second.
            links: which ranks share a node; keys and values travel once to each node. None where all share one.
        """
        layout = forward.layout
        with uploading(device) as upload:
            here = ServerRoute.of(route(forward, rank, links), kinds, upload)
            back = here if backward is forward else ServerRoute.of(route(backward, rank, links), kinds, upload)
        return NanoRoutes(int(layout.q_rows[rank]), tuple(layout.carried_from(previous, rank)), here, back)


LayerRoutes = tuple[NanoRoutes | RecurrentRoutes, ...]
"""A rank's routes of one layer, one for each nano-batch: of core attention, or of a recurrent core."""


@dataclass(frozen=True)
class StepRoutes:
    """One rank's routes of a step, for the layers of its stage. Layers of the same combination of kinds share routes.

    Attributes:
        own: by micro-batch and layer, the routes of the micro-batch's forward phase and of its backward phase.
        served_forward: by forward phase and layer, the routes of phases in which this stage has no micro-batch and only
            serves; None for other phases.
        served_backward: the same for backward phases.
    """

    own: tuple[tuple[LayerRoutes, ...], ...]
    served_forward: tuple[tuple[LayerRoutes, ...] | None, ...]
    served_backward: tuple[tuple[LayerRoutes, ...] | None, ...]

    @staticmethod
    def of(plan: StepPlan, stage: int, rank: int, device: Destination) -> StepRoutes:
        """The routes of a stage's data-parallel rank."""
        return StepRoutes._of(plan, plan.options.pool_rank(stage, rank), stage, device)

    @staticmethod
    def of_server(plan: StepPlan, place: int, device: Destination) -> StepRoutes:
        """The routes of a server without a model, by its ``place`` in the pool.

        Without pipeline stages it has routes of all micro-batches, with them of all phases."""
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
