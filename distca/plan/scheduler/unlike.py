"""Scheduling over servers that are not equally fast.

A *server* is a rank that computes attention. Where speeds differ, much work moves from slow servers to fast ones.
``scheduler.py`` calls :func:`schedule_unlike` then. Each cut of a range of queries adds work, so under a tight limit
some servers stay above it, without a receiver for their work. To begin again with a higher limit would take as long as
all moves before. So here the limit rises, and moving goes on from where it ended.

Array legend: K directions (forward, backward, or both).
"""

from __future__ import annotations

import numpy as np

from distca.plan.cost.model import Direction
from distca.plan.cost.pool import ServerWork
from distca.plan.network import Links
from distca.plan.plan import Plan
from distca.plan.scheduler.balancer import Balancer
from distca.plan.scheduler.range_split import Timer
from distca.plan.scheduler.state import SchedulerState
from distca.plan.scheduler.target_load import TargetLoad
from distca.plan.tasks import Tasks

_FINEST = 0.01
"""The smallest tolerance that is used; with a smaller one cuts take more time than they save
(benchmarks/results/planner.md)."""
_RISES = (1, 1.25, 2.5, 6, 20)
"""Multiples of the tolerance that are the limit, one after the other, until no server is above it."""
_MOST_OVERHEAD = 1.0
"""The time that a cut may add, as a part of the time that it moves. It is high because a server that nobody can relieve
costs more than that."""

Growth = dict[Direction, np.ndarray]
"""The factor [K] by which cuts made all work grow in the plan before, by direction."""


def schedule_unlike(
    home: Plan,
    work: ServerWork,
    target: TargetLoad,
    tolerance: float,
    moved_bytes: tuple[int, int],
    links: Links,
    growth: Growth,
) -> Tasks:
    """Returns the tasks of one nano-batch, a part of a micro-batch: ranges of queries, each with its server.

    Args:
        home: the plan that computes everything at home.
        work: the work of ranges on every server.
        target: how much work each server should get.
        tolerance: how far above its target a server may be, as a part of the mean load.
        moved_bytes: bytes of a query row and of a key/value row that is computed away from home.
        links: which ranks share a node, and prices of bytes between ranks.
        growth: the growth of work in the plan before; that of this plan takes its place. All nano-batches of a step
            grow alike. Limits include this growth from the start. Else servers would be filled too early, and get room
            later that is too little for a range.
    """
    aim = max(tolerance, _FINEST)
    state = SchedulerState(home, work, target, tolerance=aim, links=links)
    begin, before = np.maximum(state.mean, 1e-300), state.slowest.sum()
    state.expected = begin * growth.get(work.direction, 1.0)
    balancer = Balancer(state, Timer(work, begin.tolist(), _MOST_OVERHEAD), *moved_bytes)
    for rise in _RISES:
        state.tolerance = rise * aim
        if balancer.run(np.inf, np.inf):
            break
    tasks = state.joined()
    growth[work.direction] = state.mean / begin
    return tasks if state.slowest.sum() <= before else home.tasks
