"""One micro-batch, from document lengths to layouts and plans: everything the runtime needs, the same on every rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distca.plan.cost.model import CostModel, Direction
from distca.plan.layout import Layout
from distca.plan.metrics import imbalance, server_seconds, traffic
from distca.plan.options import PlanOptions
from distca.plan.plan import Plan, plan_at_home
from distca.plan.scheduler.scheduler import DEFAULT_TOLERANCE
from distca.plan.step import StepPlan, plan_step


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
        step: the step that this micro-batch is.
        planning_ms: milliseconds that laying out and planning took.
    """

    step: StepPlan
    planning_ms: float = field(compare=False)

    @property
    def lengths(self) -> np.ndarray:
        """[D] int64 tokens per document."""
        return self.step.lengths[0]

    @property
    def cost(self) -> CostModel:
        """The cost model that was planned with."""
        return self.step.options.cost

    @property
    def resend(self) -> bool:
        """Whether backward resends rows, to the servers of its own plan."""
        return self.step.options.resend

    @property
    def nano_batches(self) -> tuple[NanoPlan, ...]:
        """One NanoPlan per nano-batch."""
        (layouts,), (forward,), (backward,) = self.step.layouts, self.step.forward, self.step.backward
        return tuple(NanoPlan(*each) for each in zip(layouts, forward.plans, backward.plans, strict=True))

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
        seconds: np.ndarray = self.step.seconds_before().sum(axis=0)
        return seconds

    @property
    def seconds_at_home(self) -> np.ndarray:
        """[R] attention seconds per rank of one layer, forward and backward, with this plan's layouts, every shard
        computed at home."""
        homes = [plan_at_home(nano.layout) for nano in self.nano_batches]
        seconds: np.ndarray = np.sum([server_seconds(home, self.cost, "both") for home in homes], axis=0)
        return seconds

    @property
    def seconds_after(self) -> np.ndarray:
        """[R] attention seconds per server of one layer, forward and backward, as planned."""
        seconds: np.ndarray = np.sum([server_seconds(plan, self.cost, way) for plan, way in self.directed], axis=0)
        return seconds

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


def plan_micro_batch(
    lengths: Sequence[int] | np.ndarray,
    ranks: int,
    cost: CostModel,
    *,
    rank_of: Sequence[int] | np.ndarray | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
    **options: Any,
) -> MicroBatchPlan:
    """Plan one micro-batch without pipeline stages, as :func:`distca.plan.step.plan_step` does for a step of one.

    Args:
        lengths: [D] tokens per document.
        ranks: home ranks, which are also the attention servers.
        cost: seconds per CA-task.
        rank_of: [D] home rank of every document, for documents that stay whole.
        tolerance: how far above the mean the busiest server may be.
        options: see :class:`distca.plan.options.PlanOptions`.

    Raises:
        PlanError: on lengths that cannot be laid out.
    """
    began = time.perf_counter()
    step = plan_step([lengths], PlanOptions(ranks, cost, tolerance=tolerance, **options), [rank_of])
    return MicroBatchPlan(step, planning_ms=(time.perf_counter() - began) * 1e3)
