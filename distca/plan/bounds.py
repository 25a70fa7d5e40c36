"""What no plan can beat: a lower bound on the time of the slowest server."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distca.plan.cost import CostModel, Direction
from distca.plan.layout import Layout
from distca.plan.speeds import check_speeds


def makespan_bound(
    layout: Layout, cost: CostModel, direction: Direction, *, speeds: Sequence[float] | np.ndarray | None = None
) -> float:
    """Seconds that the slowest server needs at least, whatever the plan.

    The larger of two facts: all the work, uncut, spread evenly over the servers' speeds; and the last query row of the
    longest document, which one server must compute, at the highest speed. For "both" the bound of forward plus that of
    backward.

    Args:
        layout: the nano-batch.
        cost: seconds per CA-task.
        direction: forward, backward or both.
        speeds: [R] relative speed of every server; None means all equal.

    Raises:
        PlanError: on unusable speeds.
    """
    speed = check_speeds(speeds, layout.ranks)
    some = layout.last > layout.first
    first, last = layout.first[some], layout.last[some]
    total = cost.least(direction, last - first, last).sum(axis=1) / speed.sum()
    row = cost.least(direction, np.ones_like(last), last).max(axis=1, initial=0.0) / speed.max()
    return float(np.maximum(total, row).sum())
