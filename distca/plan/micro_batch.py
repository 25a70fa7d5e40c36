"""Plans one micro-batch without pipeline stages, for ``distca plan``; training plans steps instead (``step.py``).

A *row* is one token's q, or its k and v. The *home* of a row is the rank that computes the token's linear layers. A
*server* is a rank that computes attention. A *task* is a range of query rows of one document on one server. A
micro-batch is computed in one or two parts, the *nano-batches*.
"""

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
    """The plan of one nano-batch in the layers of one kind, for example all layers with a window.

    Attributes:
        layout: the home and row of every token.
        forward, backward: the tasks and their servers.
        cost: seconds per task.
        share: the fraction of the model's attention layers that are of this kind.
    """

    layout: Layout
    forward: Plan
    backward: Plan
    cost: CostModel
    share: float

    @property
    def directed(self) -> tuple[tuple[Plan, Direction], ...]:
        return (self.forward, "forward"), (self.backward, "backward")


@dataclass(frozen=True)
class Bytes:
    """Bytes that travel for one layer of one micro-batch, all ranks together.

    Attributes:
        q: bytes of query rows in forward.
        o: bytes of output rows in forward, with the log-sum-exp of scores if homes need it.
        kv: bytes of key and value rows in forward.
        backward: bytes of all rows and gradients in backward.
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
    """The plan of one micro-batch, as a step that has only this micro-batch.

    Seconds and bytes are those of one layer: the mean over all layers with attention. Array legend: D documents,
    R servers, which are the homes and then servers without a model.
    """

    step: StepPlan
    planning_ms: float = field(compare=False)

    @property
    def lengths(self) -> np.ndarray:
        """Returns [D] int64 tokens per document."""
        return self.step.lengths[0]

    @property
    def cost(self) -> CostModel:
        return self.step.options.cost

    @property
    def resend(self) -> bool:
        """Returns whether homes send q, k and v again for backward; otherwise servers keep them from forward."""
        return self.step.options.resend

    @property
    def nano_batches(self) -> tuple[NanoPlan, ...]:
        """Returns the plan of each nano-batch in layers of the first kind."""
        return self.by_kind[0]

    @property
    def by_kind(self) -> tuple[tuple[NanoPlan, ...], ...]:
        """Returns, for each kind of layer, the plan of each nano-batch."""
        # All pipeline stages run their layer i together. The kinds of these layers are a *combination*. Here there is
        # one stage, so a combination is one kind.
        step, options = self.step, self.step.options
        (layouts,), (forward,), (backward,) = step.layouts, step.forward, step.backward
        costs = [options.cost_of_kind[kind] for (kind,) in options.combinations]
        by_kind = zip(forward.by_combination, backward.by_combination, costs, options.shares_of_layers, strict=True)
        return tuple(
            tuple(NanoPlan(*each, cost, float(share)) for each in zip(layouts, there, back, strict=True))
            for there, back, cost, share in by_kind
        )

    @property
    def every_nano_batch(self) -> list[NanoPlan]:
        return [nano for nanos in self.by_kind for nano in nanos]

    def of_kind(self, number: int) -> MicroBatchPlan:
        """Returns the plan for a model whose layers all have the kind with index ``number`` in :attr:`by_kind`."""
        return MicroBatchPlan(self.step.of_combination(number), self.planning_ms)

    @property
    def plans(self) -> tuple[Plan, ...]:
        return tuple(plan for nano in self.every_nano_batch for plan in (nano.forward, nano.backward))

    @property
    def seconds_before(self) -> np.ndarray:
        """Returns [R] attention seconds, forward and backward, without balancing.

        Documents are on their homes, or one after the other if they have none. Every rank computes its own rows."""
        seconds: np.ndarray = self.step.seconds_before().sum(axis=0)
        return seconds

    @property
    def seconds_at_home(self) -> np.ndarray:
        """Returns [R] attention seconds, forward and backward, if each home of this plan computes its own rows."""
        return np.asarray(
            sum(
                nano.share * server_seconds(plan_at_home(nano.forward.layout), nano.cost, "both")
                for nano in self.every_nano_batch
            )
        )

    @property
    def seconds_after(self) -> np.ndarray:
        """Returns [R] attention seconds, forward and backward, as planned."""
        return np.asarray(
            sum(
                nano.share * server_seconds(plan, nano.cost, way)
                for nano in self.every_nano_batch
                for plan, way in nano.directed
            )
        )

    @property
    def imbalance_before(self) -> float:
        """Returns the largest of :attr:`seconds_before`, divided by their mean."""
        return imbalance(self.seconds_before)

    @property
    def imbalance_after(self) -> float:
        """Returns the largest of :attr:`seconds_after`, divided by their mean."""
        return imbalance(self.seconds_after)

    @property
    def bytes_moved(self) -> Bytes:
        return self.bytes_of_layers(1)

    def bytes_of_layers(self, layers: int) -> Bytes:
        """Returns the mean layer's bytes, times the number of ``layers``."""
        options, shape = self.step.options, self.cost.shape
        q_forward, _ = shape.moved_bytes("forward", self.resend, options.sinks)
        q_backward, kv_backward = shape.moved_bytes("backward", self.resend, options.sinks)
        q = kv = backward = 0.0
        for nano in self.every_nano_batch:
            there = traffic(nano.forward)
            back = traffic(nano.backward) if self.resend else there
            q, kv = q + nano.share * there.q_rows, kv + nano.share * there.kv_rows
            backward += nano.share * (back.q_rows * q_backward + back.kv_rows * kv_backward)
        return Bytes(
            q=round(q * shape.q_bytes * layers),
            o=round(q * (q_forward - shape.q_bytes) * layers),
            kv=round(kv * shape.kv_bytes * layers),
            backward=round(backward * layers),
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
    """Plans one micro-batch without pipeline stages.

    Args:
        lengths: [D] tokens per document.
        ranks: number of homes; every home is a server too.
        cost: seconds per task.
        rank_of: [D] home of every document, if documents must stay whole; None lets documents span ranks.
        tolerance: how far the slowest server's time should at most be above the mean, as a fraction of the mean.
        options: further options of :class:`distca.plan.options.PlanOptions`.

    Raises:
        PlanError: lengths cannot be laid out, or the options are not valid.
    """
    began = time.perf_counter()
    step = plan_step([lengths], PlanOptions(ranks, cost, tolerance=tolerance, **options), [rank_of])
    return MicroBatchPlan(step, planning_ms=(time.perf_counter() - began) * 1e3)
