"""Schedules attention over servers that are not equally fast.

A *server* is a rank that computes attention. *Work* is time on a server of mean speed. A server's *target* is its work
if all servers end at the same time. Its *limit* is the work that it has done a *tolerance* later. ``scheduler.py``
calls :func:`schedule_unlike`, which moves ranges of queries from servers above their limits to other servers. Equally
fast servers are scheduled here too if their costs are a ``PoolCost``, as with servers without a model.

K directions (forward, backward, or both). Constants except ``_RISES`` were compared with other values:
``benchmarks/planner_constants.py``, benchmarks/results/planner.md.
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
"""A smaller tolerance counts as this. With a smaller one, cuts of ranges add more time than they save."""
_RISES = (1, 1.25, 2.5, 6, 20)
"""These multiples of the tolerance are tried in turn until no server is above its limit."""
_MOST_OVERHEAD = 1.0
"""The most time that cutting a range in two may add, as a part of the time of the range that moves."""

Growth = dict[Direction, np.ndarray]
"""For each direction, [K] work of the latest plan, over the work if no range is cut."""


def schedule_unlike(
    home: Plan,
    work: ServerWork,
    target: TargetLoad,
    tolerance: float,
    moved_bytes: tuple[int, int],
    links: Links,
    growth: Growth,
) -> Tasks:
    """Returns the tasks of one nano-batch, a micro-batch or a part of one. A task is a range of queries on one server.

    The result is the tasks of ``home`` if the slowest servers would take longer after the moves.

    Args:
        home: the plan in which every rank computes the attention of its own rows.
        tolerance: the seconds that a server at its first limit takes beyond its target, as a part of the mean work.
        moved_bytes: bytes that travel for a query row, and for a key/value row.
        links: which ranks share a node, and prices of bytes between ranks.
        growth: cuts raise the mean work. Limits are computed as if it grew by these factors. The new plan's factors
            replace them.
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
