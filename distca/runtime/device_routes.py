"""A rank's routes in device form, made once per micro-batch and used by all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distca.attention import TaskBatch
from distca.device.host_to_device import Destination, uploading
from distca.plan import Layout, Links, Plan, Route, Segments, StepPlan, route
from distca.plan.step import Phase
from distca.transport import RowMoves


@dataclass(frozen=True)
class ServerRoute:
    """A route ready to run.

    Attributes:
        q_to_server: query rows (also o and dO in backward) from home ranks to servers.
        q_to_home: o, log-sum-exp and dQ back.
        kv_to_server: key/value rows to servers, in one hop or two.
        kv_to_home: dK, dV back, added up where several servers return the same row.
        repeats: copies from the server's k,v buffer to the tasks' regions: by source row (target row, rows), in task
            order, so the last of each has most rows. Empty where no two tasks share rows and none are of the half
            before.
        before: the same from the server's k,v buffer of the half before.
        batch: borders of this server's CA-tasks.
        q_rows: query rows in the server's buffer.
        kv_rows: key/value rows in the server's buffer, which hold every row once.
    """

    q_to_server: RowMoves
    q_to_home: RowMoves
    kv_to_server: RowMoves
    kv_to_home: RowMoves
    repeats: dict[int, list[tuple[int, int]]]
    before: dict[int, list[tuple[int, int]]]
    batch: TaskBatch
    q_rows: int
    kv_rows: int

    @staticmethod
    def of(route: Route, device: Destination) -> ServerRoute:
        """Bring a route to ``device``; copies to a GPU do not block the host."""
        with uploading(device) as upload:
            return ServerRoute(
                *RowMoves.there_and_back(route.q, route.ranks, upload),
                *RowMoves.in_hops(route.kv, route.relay, route.ranks, upload),
                _by_source(route.kv.repeat),
                _by_source(route.kv.before),
                TaskBatch.of(route.cu_q, route.cu_kv, upload),
                route.q.destination_rows,
                route.kv.destination_rows,
            )


def _by_source(repeat: Segments) -> dict[int, list[tuple[int, int]]]:
    """(Destination row, rows) of segments by their source row, all in order."""
    copies: dict[int, list[tuple[int, int]]] = {}
    columns = (repeat.source.tolist(), repeat.destination.tolist(), repeat.rows.tolist())
    for source, target, rows in sorted(zip(*columns, strict=True)):
        copies.setdefault(source, []).append((target, rows))
    return copies


@dataclass(frozen=True)
class NanoRoutes:
    """Everything a rank needs to run one nano-batch.

    Attributes:
        q_rows: query rows that live on this rank; rows of a home tensor beyond them are padding and take no part.
        prefix: (first row, one past the last) of the previous nano-batch's rows whose keys and values this one needs
            again.
        forward: route of the forward plan.
        backward: route of the backward plan; the same object where gradients are computed by the forward's servers.
    """

    q_rows: int
    prefix: tuple[int, int]
    forward: ServerRoute
    backward: ServerRoute

    @staticmethod
    def of(
        forward: Plan,
        backward: Plan,
        rank: int,
        device: Destination,
        previous: Layout | None = None,
        links: Links | None = None,
    ) -> NanoRoutes:
        """Routes of ``rank`` for a nano-batch.

        Args:
            forward: its plan.
            backward: its backward plan, over the same layout; may be ``forward`` itself.
            rank: this rank in the server pool.
            device: where the rows live; with an upload the routes are ready once that was sent.
            previous: layout of the nano-batch before this one, if it is the second.
            links: which ranks share a node, to each of which keys and values travel once; None for all.
        """
        layout = forward.layout
        with uploading(device) as upload:
            here = ServerRoute.of(route(forward, rank, links), upload)
            back = here if backward is forward else ServerRoute.of(route(backward, rank, links), upload)
        carried_rows = int(layout.carried_rows[rank])
        end = int(previous.q_rows[rank]) if previous is not None else 0
        return NanoRoutes(int(layout.q_rows[rank]), (end - carried_rows, end), here, back)


LayerRoutes = tuple[NanoRoutes, ...]
"""Of one layer: a rank's routes of each nano-batch, one or two."""


@dataclass(frozen=True)
class StepRoutes:
    """One rank's routes of a step; the same for all layers of its stage.

    Attributes:
        own: by micro-batch: forward in the micro-batch's forward phase, backward in its backward phase.
        served_forward: by forward phase, of one in which this stage has no micro-batch and only serves; else None.
        served_backward: the same for backward phases.
    """

    own: tuple[LayerRoutes, ...]
    served_forward: tuple[LayerRoutes | None, ...]
    served_backward: tuple[LayerRoutes | None, ...]

    @staticmethod
    def of(plan: StepPlan, stage: int, rank: int, device: Destination) -> StepRoutes:
        """Routes of a stage's data-parallel rank."""
        me = plan.options.pool_rank(stage, rank)

        def routes(there: Phase, back: Phase) -> LayerRoutes:
            before = [None, *(each.layout for each in there.plans)]
            return tuple(
                NanoRoutes.of(one, other, me, device, previous, plan.options.links)
                for one, other, previous in zip(there.plans, back.plans, before, strict=False)
            )

        def served(phases: Sequence[Phase]) -> tuple[LayerRoutes | None, ...]:
            return tuple(routes(each, each) if each.micro_batches[stage] is None else None for each in phases)

        own = (
            routes(plan.forward[plan.forward_phase(m, stage)], plan.backward[plan.backward_phase(m, stage)])
            for m in range(len(plan.layouts))
        )
        return StepRoutes(tuple(own), served(plan.forward), served(plan.backward))
