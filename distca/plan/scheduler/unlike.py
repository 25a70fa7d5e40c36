"""Scheduling over servers that are not alike: time is levelled, and most work moves.

A limit that leaves no room for what cuts add ends with servers that nobody can relieve. To begin again at home with
another limit takes as long as all moves before. So the limit rises instead, and what is left moves on from where it is.

Array legend: K directions.
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
"""Tolerance that is tried at least: for a finer one cuts take more time than it saves."""
_RISES = (1, 1.25, 2.5, 6, 20)
"""Multiples of the tolerance that are the limit, one after the other, as long as a server is above it."""
_MOST_OVERHEAD = 1.0
"""Share of the time it moves that a cut may add: so much moves that a server which nobody can relieve costs more."""

Growth = dict[Direction, np.ndarray]
"""The factor, [K], by which cuts made all work grow in the plan before; by direction."""


def schedule_unlike(
    home: Plan,
    work: ServerWork,
    target: TargetLoad,
    tolerance: float,
    moved_bytes: tuple[int, int],
    links: Links,
    growth: Growth,
) -> Tasks:
    """The tasks of one nano-batch.

    Args:
        home: the plan that computes everything at home.
        work: of ranges on every server.
        target: how much of it each should get.
        tolerance: as of :func:`distca.plan.scheduler.scheduler.schedule`.
        moved_bytes: of a query row and of a key/value row that is computed away from home.
        links: prices of bytes between ranks.
        growth: of the plan before; that of this one is noted in it. Halves of one micro-batch grow alike, and a limit
            that has room for the growth from the start leaves no crumbs of room.
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
