"""What a plan does to the cluster: seconds per server, rows that travel, rows received; and what no plan can beat.

Array legend: R ranks. Rows are int64, seconds float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.plan.cost.model import CostModel, Direction
from distca.plan.layout import Layout, Shards, overlaps
from distca.plan.plan import Plan, Tasks


@dataclass(frozen=True)
class Traffic:
    """Rows that travel between ranks for one plan, once.

    Attributes:
        q: [R, R] query rows from home rank to server, 0 on the diagonal.
        kv: [R, R] key/value rows from home rank to server, 0 on the diagonal.
    """

    q: np.ndarray
    kv: np.ndarray

    @property
    def q_rows(self) -> int:
        return int(self.q.sum())

    @property
    def kv_rows(self) -> int:
        return int(self.kv.sum())


def server_seconds(plan: Plan, cost: CostModel, direction: Direction) -> np.ndarray:
    """[R] seconds of every server's fused batch; "both" adds forward and backward."""
    tasks = plan.tasks
    seconds = cost.per_direction(direction, tasks.stop - tasks.start, tasks.stop).sum(axis=0)
    return np.bincount(tasks.server, weights=seconds, minlength=plan.layout.ranks)


def imbalance(seconds: np.ndarray) -> float:
    """Slowest over mean; 1 for no work at all."""
    mean = float(seconds.mean())
    return float(seconds.max()) / mean if mean > 0 else 1.0


def traffic(plan: Plan) -> Traffic:
    """The rows that ``plan`` really moves: what a server already holds as a home rank is free, and a document's k,v
    rows travel to a server once, however many of its tasks read them."""
    layout, tasks = plan.layout, plan.tasks
    last = tasks.take(tasks.last_on_server)
    reading = Tasks(last.document, np.zeros(len(last), np.int64), last.stop, last.server)
    return Traffic(_matrix(tasks, layout.q, layout.ranks), _matrix(reading, layout.kv, layout.ranks))


def _matrix(ranges: Tasks, shards: Shards, ranks: int) -> np.ndarray:
    piece, shard, rows = overlaps(ranges.document, ranges.start, ranges.stop, shards)
    home, server = shards.rank[shard], ranges.server[piece]
    away = home != server
    flat = np.bincount((home * ranks + server)[away], weights=rows[away], minlength=ranks * ranks)
    return flat.astype(np.int64).reshape(ranks, ranks)


def makespan_bound(layout: Layout, cost: CostModel, direction: Direction) -> float:
    """Seconds that the slowest server needs at least, whatever the plan.

    The larger of two facts: all the work, uncut, spread evenly over the servers; and the last query row of the longest
    document, which one server must compute. For "both" the bound of forward plus that of backward.

    Args:
        layout: the nano-batch.
        cost: seconds per CA-task.
        direction: forward, backward or both.
    """
    some = layout.last > layout.first
    first, last = layout.first[some], layout.last[some]
    total = cost.least(direction, last - first, last).sum(axis=1) / layout.ranks
    row = cost.least(direction, np.ones_like(last), last).max(axis=1, initial=0.0)
    return float(np.maximum(total, row).sum())
