"""What measured times say beyond the cost model: how fast each server is, and what far-reaching tasks really cost.

A task's *reach* is the share of its keys that lie before its first query: 0 for the beginning of a document, near 1 for
a few queries at the end of a long one. A table is measured on batches of equal tasks, and the analytic model is a fit;
what they err by on the mixed batches of a plan was found to go with reach (docs/planning.md#learned-costs).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from distca.plan.cost.model import CostModel, Direction
from distca.plan.plan import Plan

PhaseKind = tuple[str, tuple[bool, ...]]
"""Phases of a kind are learned together: the direction, and by stage whether it runs a micro-batch."""

WHOLE_STEP: PhaseKind = ("both", (True,))
"""Without pipeline stages a whole step is of one kind."""


@dataclass(frozen=True)
class Learned:
    """What was learned of one kind of phase.

    Attributes:
        speeds: [R] float64 relative speeds of servers, mean 1.
        reach_cost: how much more than the cost model says a task takes per unit of reach.
        typical_reach: at which the cost model is right; only differences between tasks were learned.
    """

    speeds: np.ndarray
    reach_cost: float = 0.0
    typical_reach: float = 0.0

    @staticmethod
    def nothing(servers: int) -> Learned:
        """Equal speeds, and the cost model as it is."""
        return Learned(np.ones(servers))

    def cost(self, model: CostModel) -> CostModel:
        """The cost model as corrected."""
        return ReachCost(model, self.reach_cost, self.typical_reach) if self.reach_cost else model


Learnings = Mapping[PhaseKind, Learned]
"""By kind of phase; of a kind that is not there, nothing is known."""


@dataclass(frozen=True)
class ServerWork:
    """What servers were given, by the cost model alone. Array legend: [..., R] servers.

    Attributes:
        seconds: [..., R] that a server of speed 1 takes.
        reaching: [..., R] the same, each task's seconds times its reach.
    """

    seconds: np.ndarray
    reaching: np.ndarray

    @staticmethod
    def of_phases(works: Iterable[ServerWork], stages: int = 1) -> ServerWork:
        """[phases, stages x R]: each phase's work, the same on every one of ``stages``."""
        rows = zip(*((work.seconds, work.reaching) for work in works), strict=True)
        return ServerWork(*(np.tile(np.stack(each), stages) for each in rows))


class ReachCost(CostModel):
    """A cost model with every task's seconds times 1 + ``reach_cost`` x (its reach - ``typical``)."""

    def __init__(self, model: CostModel, reach_cost: float, typical: float = 0.0) -> None:
        self.shape, self.block, self.linear = model.shape, model.block, model.linear
        self._model, self._reach_cost, self._typical = model, reach_cost, typical

    def forward(self, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return self.per_direction("forward", q_rows, kv_rows)[0]

    def backward(self, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return self.per_direction("backward", q_rows, kv_rows)[0]

    def per_direction(self, direction: Direction, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        seconds = self._model.per_direction(direction, q_rows, kv_rows)
        return seconds * (1 + self._reach_cost * (_reach(q_rows, kv_rows) - self._typical))

    def least(self, direction: Direction, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        # Every part of a range reaches at least as far as the whole, and less than 1.
        reach = _reach(q_rows, kv_rows) if self._reach_cost > 0 else 1.0
        return self._model.least(direction, q_rows, kv_rows) * (1 + self._reach_cost * (reach - self._typical))


def work_of(plans: Iterable[tuple[Plan, Direction]], cost: CostModel, servers: int) -> ServerWork:
    """What several plans over one pool give each server, together; "both" adds forward and backward."""
    work = np.zeros((2, servers))
    for plan, direction in plans:
        tasks = plan.tasks
        q_rows, kv_rows = tasks.stop - tasks.start, tasks.stop
        seconds = cost.per_direction(direction, q_rows, kv_rows).sum(axis=0)
        for row, weights in zip(work, (seconds, seconds * _reach(q_rows, kv_rows)), strict=True):
            row += np.bincount(tasks.server, weights=weights, minlength=servers)
    return ServerWork(*work)


def _reach(q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
    """[N] shares; 0 where there are no keys."""
    reach: np.ndarray = 1 - q_rows / np.maximum(kv_rows, 1)
    return reach
