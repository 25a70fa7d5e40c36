"""Scheduling over servers of unlike speed, where most work moves.

Cuts add work, so a tight limit ends with servers that nobody can relieve. Beginning again at home with another limit
would take as long as all moves before. So the limit rises instead, and the servers above it are relieved from there.

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
"""The finest tolerance: for finer ones cuts take more time than they save (benchmarks/results/planner.md)."""
_RISES = (1, 1.25, 2.5, 6, 20)
"""Multiples of the tolerance that are the limit, one after the other, while a server is above it."""
_MOST_OVERHEAD = 1.0
"""The time that a cut may add, as a part of the time that it moves. It is high, as a server that nobody can relieve
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
    """The tasks of one nano-batch.

    Args:
        home: the plan that computes everything at home.
        work: the work of ranges on every server.
        target: how much work each server should get.
        tolerance: as in :func:`distca.plan.scheduler.scheduler.schedule`.
        moved_bytes: bytes of a query row and of a key/value row that is computed away from home.
        links: prices of bytes between ranks.
        growth: the growth of the plan before; that of this one is noted in it. Ping and pong of one micro-batch grow
            alike. A limit with room for the growth from the start leaves no crumbs of room.
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
