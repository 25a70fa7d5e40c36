"""The rows that a rank sends, receives and reads for core attention, as index tensors on the rank's device.

- home: a rank that holds rows (a row is one token's q, k, v or o).
- server: a rank that computes attention. Every home is a server too; further servers have no model.
- task: a range of a document's queries, with all keys and values that these queries see.
- plan: which server computes which task. A *route* is one rank's part of a plan.
- k,v buffer: the k,v rows that a server has received, without repetition.
- region: the contiguous k,v rows of one task, which the kernel reads. All regions are one tensor.
- nano-batch: the whole micro-batch, or one of its two parts, *ping* (first) and *pong* (second).
- kind: attention layers with equal window, scale and softcap. Either all of them have sinks (learned scores in the
  softmax), or none has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from distca.attention import TaskBatch
from distca.device.host_to_device import Destination, to_device, uploading
from distca.plan import AttentionKind, Layout, Links, Plan, Route, Segments, StepPlan, route
from distca.plan.phases import Phase
from distca.plan.sorting import expand
from distca.runtime.recurrent_routes import RecurrentRoutes
from distca.transport import RowMoves, cuda_ops
from distca.transport.gather_scatter import move_rows


@dataclass(frozen=True)
class SharedRows:
    """A range of rows in a server's k,v buffer, and its copies in the tensor of regions.

    Example: the range is buffer rows [10, 17). One task needs rows [10, 14), copied to row 0 of the regions. Another
    task needs all seven rows, copied to row 4. Then ``first`` is 10 and ``places`` are (0, 0, 4) and (0, 4, 7).

    Attributes:
        places: for each copy (first row in the range, first row in the regions, number of rows). The last copy ends at
            the end of the range.
    """

    first: int
    places: list[tuple[int, int, int]]

    @staticmethod
    def of(copies: Segments) -> list[SharedRows]:
        """Groups copies that read overlapping buffer rows."""
        found: list[SharedRows] = []
        columns, end = (copies.source.tolist(), copies.destination.tolist(), copies.rows.tolist()), -1
        for source, target, rows in sorted(zip(*columns, strict=True)):
            if source >= end:
                found.append(SharedRows(source, []))
            found[-1].places.append((source - found[-1].first, target, rows))
            end = max(end, source + rows)
        return found


_MOST_COPIES = 3
"""Up to this many ranges of rows are copied in a launch each. If there are more, one launch copies all their rows.
Without the CUDA library every range has a launch, because torch would first copy all rows into a temporary tensor."""


@dataclass(frozen=True)
class RangeCopies:
    """Copies of ranges of rows from one tensor to another.

    Attributes:
        ranges: for each range (first row of the source, first row of the target, number of rows).
        rows: int64 numbers of all rows in the source and in the target, on the device; None if each range has a launch.
    """

    ranges: list[tuple[int, int, int]]
    rows: tuple[torch.Tensor, torch.Tensor] | None

    @staticmethod
    def of(ranges: list[tuple[int, int, int]], device: Destination) -> RangeCopies:
        if len(ranges) <= _MOST_COPIES or not cuda_ops.is_available():
            return RangeCopies(ranges, None)
        source, target, count = np.array(ranges, np.int64).T
        return RangeCopies(ranges, (to_device(expand(source, count), device), to_device(expand(target, count), device)))

    def run(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies rows; both tensors are contiguous."""
        if self.rows is not None:
            move_rows(source, self.rows[0], target, self.rows[1])
            return
        for begin, place, rows in self.ranges:
            target[place : place + rows].copy_(source[begin : begin + rows])


@dataclass(frozen=True)
class KindBatch:
    """Consecutive tasks of one kind, for one kernel call.

    Attributes:
        batch: where each task's rows begin and end, counted from this batch's first row.
        q, kv: the batch's rows in the server's query buffer and in the tensor of regions.
    """

    kind: AttentionKind
    batch: TaskBatch
    q: slice
    kv: slice

    @staticmethod
    def of(route: Route, kinds: Sequence[AttentionKind], device: Destination) -> tuple[KindBatch, ...]:
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
        q_to_server: moves from homes to servers, for tensors with a row for each query, such as q and dO.
        q_to_home: moves from servers to homes, for tensors with a row for each query, such as o and dQ.
        kv_to_server: moves of k and v to servers. A row for several servers of another node may travel to one of them,
            which sends the row on.
        kv_to_home: moves of dK and dV to homes. A home adds up the gradients of a row that arrive. Servers of another
            node may send theirs to one of them, which adds them up first.
        repeats: copies from this server's k,v buffer to the regions. Empty if the buffer itself serves as the regions.
        before: in pong, copies to the regions from the k,v buffer that this server has kept from ping.
        copies: those of ``repeats`` and of ``before``.
        copies_back: for each range of ``repeats``, the reverse of its last copy: from the regions to the k,v buffer.
        q_rows, kv_rows, region_rows: numbers of rows in the query buffer, in the k,v buffer, and in all regions.
    """

    q_to_server: RowMoves
    q_to_home: RowMoves
    kv_to_server: RowMoves
    kv_to_home: RowMoves
    repeats: list[SharedRows]
    before: list[SharedRows]
    copies: tuple[RangeCopies, RangeCopies]
    copies_back: RangeCopies
    batches: tuple[KindBatch, ...]
    q_rows: int
    kv_rows: int
    region_rows: int

    @cached_property
    def kinds(self) -> str:
        return " and ".join(dict.fromkeys(each.kind.name for each in self.batches))

    @staticmethod
    def of(route: Route, kinds: Sequence[AttentionKind], device: Destination) -> ServerRoute:
        """Copies a route to ``device`` without blocking the host."""
        repeats, before = SharedRows.of(route.kv.repeat), SharedRows.of(route.kv.before)
        with uploading(device) as upload:
            return ServerRoute(
                *RowMoves.there_and_back(route.q, route.ranks, upload),
                *RowMoves.in_hops(route.kv, route.relay, route.ranks, upload),
                repeats,
                before,
                (RangeCopies.of(_copies_of(repeats), upload), RangeCopies.of(_copies_of(before), upload)),
                RangeCopies.of([_last_copy_back(each) for each in repeats], upload),
                KindBatch.of(route, kinds, upload),
                route.q.destination_rows,
                route.kv.destination_rows,
                int(route.cu_kv[-1]),
            )


def _copies_of(shared: Sequence[SharedRows]) -> list[tuple[int, int, int]]:
    return [(each.first + offset, place, rows) for each in shared for offset, place, rows in each.places]


def _last_copy_back(shared: SharedRows) -> tuple[int, int, int]:
    offset, place, rows = shared.places[-1]
    return place, shared.first + offset, rows


@dataclass(frozen=True)
class NanoRoutes:
    """One rank's routes for one nano-batch.

    Attributes:
        q_rows: number of rows that this rank holds as a home, without padding.
        prefix: in pong, ranges [first, end) of this rank's rows in ping. Queries in pong see the k and v of these rows.
            Pong sends these k and v to servers that have not kept them from ping.
        backward: route of the backward plan; may be ``forward`` itself.
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
        """Returns the routes of ``rank`` for a nano-batch.

        Args:
            backward: the backward plan, over the same layout as ``forward``. A layout says which home holds which rows.
            device: a device, or an upload (a batch of copies to it); tensors get their values when the upload is sent.
            previous: in pong, the layout of ping; None in ping.
            links: which ranks share a node; None if all do.
        """
        layout = forward.layout
        with uploading(device) as upload:
            here = ServerRoute.of(route(forward, rank, links), kinds, upload)
            back = here if backward is forward else ServerRoute.of(route(backward, rank, links), kinds, upload)
        return NanoRoutes(int(layout.q_rows[rank]), tuple(layout.carried_from(previous, rank)), here, back)


LayerRoutes = tuple[NanoRoutes | RecurrentRoutes, ...]
"""A rank's routes in one layer, one for each nano-batch. Linear attention and SSM have :class:`RecurrentRoutes`."""


@dataclass(frozen=True)
class StepRoutes:
    """One rank's routes of a step, for the layers of its pipeline stage.

    In a *phase*, all stages run forward at the same time, or all run backward. Each stage has one micro-batch or none.
    The ranks of a stage without a micro-batch still compute attention for others. ``layers`` are those of the option
    ``layer_kinds``; if it is empty, all layers share one entry.

    Attributes:
        own: [micro-batches][layers] routes of this stage's micro-batches.
        served_forward, served_backward: for each phase, [layers] routes if this rank has no micro-batch, else None.
    """

    own: tuple[tuple[LayerRoutes, ...], ...]
    served_forward: tuple[tuple[LayerRoutes, ...] | None, ...]
    served_backward: tuple[tuple[LayerRoutes, ...] | None, ...]

    @staticmethod
    def of(plan: StepPlan, stage: int, rank: int, device: Destination) -> StepRoutes:
        """Returns the routes of data-parallel rank ``rank`` of pipeline stage ``stage``, in layers with attention.

        Callers add those of recurrent layers."""
        return StepRoutes._of(plan, plan.options.pool_rank(stage, rank), stage, device)

    @staticmethod
    def of_server(plan: StepPlan, place: int, device: Destination) -> StepRoutes:
        """Returns the routes of a server without a model.

        With one pipeline stage the routes are in ``own``, otherwise in ``served_forward`` and ``served_backward``.
        ``place`` is the server's number in the plan."""
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

        # All stages run their layer i at the same time. The kinds of these layers, one for each stage, are a
        # combination, such as (full, window 512). Each combination has its own plans, and ``layer_combinations[i]`` is
        # the combination's number.
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
