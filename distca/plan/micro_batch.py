"""One micro-batch, from document lengths to layouts and plans: everything the runtime needs, the same on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from distca.plan.cost.model import CostModel, Direction
from distca.plan.layout import Dealing, Layout, lay_out
from distca.plan.metrics import imbalance, server_seconds, traffic
from distca.plan.placement import Placement
from distca.plan.plan import Plan, plan_at_home
from distca.plan.scheduler.scheduler import DEFAULT_TOLERANCE, Links, schedule


@dataclass(frozen=True)
class NanoPlan:
    """One nano-batch. ``backward`` is ``forward`` itself when the server keeps its tasks' rows for the backward."""

    layout: Layout
    forward: Plan
    backward: Plan


@dataclass(frozen=True)
class Bytes:
    """Bytes that travel for one layer of one micro-batch, all ranks together.

    Attributes:
        q: query rows to servers, forward.
        o: output rows back home, forward (with their log-sum-exp when backward resends).
        kv: key and value rows to servers, forward.
        backward: everything the backward moves.
    """

    q: int
    o: int
    kv: int
    backward: int

    @property
    def total(self) -> int:
        return self.q + self.o + self.kv + self.backward


@dataclass(frozen=True)
class MicroBatchPlan:
    """Layouts and plans of one micro-batch's nano-batches, and what they achieve. Array legend: D documents, R ranks.

    Attributes:
        nano_batches: one NanoPlan per nano-batch.
        lengths: [D] int64 tokens per document.
        cost: the cost model that was planned with.
        resend: whether backward resends rows, to the servers of its own plan.
        planning_ms: milliseconds that laying out and planning took.
        in_order: makes the layout, in one piece, that plain packing of the same documents would have.
    """

    nano_batches: tuple[NanoPlan, ...]
    lengths: np.ndarray
    cost: CostModel
    resend: bool
    planning_ms: float = field(compare=False)
    in_order: Callable[[], tuple[Layout, ...]] = field(compare=False, repr=False)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Of every nano-batch, forward and backward."""
        return tuple(plan for plan, _ in self.directed)

    @property
    def directed(self) -> list[tuple[Plan, Direction]]:
        """All plans with what they are for."""
        return [
            directed
            for nano in self.nano_batches
            for directed in ((nano.forward, "forward"), (nano.backward, "backward"))
        ]

    @property
    def seconds_before(self) -> np.ndarray:
        """[R] attention seconds per rank of one layer, forward and backward, without placement by work,
        servers or halves: documents in order, every shard computed at home."""
        return self._seconds([(plan_at_home(layout),) * 2 for layout in self.in_order()])

    @property
    def seconds_at_home(self) -> np.ndarray:
        """[R] attention seconds per rank of one layer, forward and backward, with this plan's layouts, every shard
        computed at home."""
        return self._seconds([(plan_at_home(nano.layout),) * 2 for nano in self.nano_batches])

    @property
    def seconds_after(self) -> np.ndarray:
        """[R] attention seconds per server of one layer, forward and backward, as planned."""
        return self._seconds([(nano.forward, nano.backward) for nano in self.nano_batches])

    @property
    def imbalance_before(self) -> float:
        """Slowest rank over the mean, documents in order and every shard at home."""
        return imbalance(self.seconds_before)

    @property
    def imbalance_after(self) -> float:
        """Slowest server over the mean, as planned."""
        return imbalance(self.seconds_after)

    @property
    def bytes_moved(self) -> Bytes:
        """Bytes that travel for one layer."""
        shape = self.cost.shape
        q_out, kv_out = shape.q_bytes, shape.kv_bytes
        q_forward, _ = shape.moved_bytes("forward", self.resend)
        q_backward, kv_backward = shape.moved_bytes("backward", self.resend)
        there = [traffic(nano.forward) for nano in self.nano_batches]
        back = [traffic(nano.backward) for nano in self.nano_batches] if self.resend else there
        q_rows = sum(rows.q_rows for rows in there)
        return Bytes(
            q=q_rows * q_out,
            o=q_rows * (q_forward - q_out),
            kv=sum(rows.kv_rows for rows in there) * kv_out,
            backward=sum(rows.q_rows * q_backward + rows.kv_rows * kv_backward for rows in back),
        )

    def _seconds(self, plans: list[tuple[Plan, Plan]]) -> np.ndarray:
        return np.sum(
            [
                server_seconds(forward, self.cost, "forward") + server_seconds(backward, self.cost, "backward")
                for forward, backward in plans
            ],
            axis=0,
        )


def plan_micro_batch(
    lengths: Sequence[int] | np.ndarray,
    ranks: int,
    cost: CostModel,
    *,
    nano_batches: int = 1,
    rank_of: Sequence[int] | np.ndarray | None = None,
    align: int = 1,
    dealing: Dealing = "even",
    placement: Placement = "spread",
    resend: bool = False,
    disaggregate: bool = True,
    tolerance: float = DEFAULT_TOLERANCE,
    links: Links | None = None,
    max_received_bytes: int | None = None,
) -> MicroBatchPlan:
    """Lay out and plan a micro-batch from its document lengths; deterministic, so every rank gets the same answer.

    Args:
        lengths: [D] tokens per document.
        ranks: home ranks, which are also the attention servers.
        cost: seconds per CA-task.
        nano_batches, rank_of, align, dealing, placement: see ``lay_out``; unlike there, two halves are dealt evenly and
            long documents are spread.
        resend: plan the backward on its own; needed where a forward's server is gone by its backward (pipelines).
        disaggregate: False places documents in order and computes every shard at home.
        tolerance, links, max_received_bytes: see ``schedule``.

    Raises:
        PlanError: on lengths that cannot be laid out, or a memory cap that cannot be met.
    """
    began = time.perf_counter()
    in_order = partial(lay_out, lengths, ranks, rank_of=rank_of, align=align)
    halves = partial(in_order, nano_batches=nano_batches, dealing=dealing)
    layouts = halves(placement=placement, cost=cost) if disaggregate else halves()
    plan_one = partial(
        schedule,
        cost=cost,
        tolerance=tolerance,
        resend=resend,
        links=links,
        max_received_bytes=max_received_bytes,
    )
    planned = []
    for layout in layouts:
        if not disaggregate:
            forward = backward = plan_at_home(layout)
        elif resend:
            forward, backward = plan_one(layout, direction="forward"), plan_one(layout, direction="backward")
        else:
            forward = backward = plan_one(layout, direction="both")
        planned.append(NanoPlan(layout, forward, backward))
    return MicroBatchPlan(
        tuple(planned),
        np.asarray(lengths, np.int64).reshape(-1),
        cost,
        resend,
        planning_ms=(time.perf_counter() - began) * 1e3,
        in_order=in_order,
    )
