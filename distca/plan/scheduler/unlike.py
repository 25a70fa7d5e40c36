"""Schedules attention over servers that are not equally fast.

A *server* is a rank that computes attention. If servers differ in speed, ``scheduler.py`` calls
:func:`schedule_unlike`. Much work then moves from slow to fast servers. Every cut of a range of queries adds work. So
some servers may stay above a tight limit. Then the limit rises, and more ranges move. Beginning again with a higher
limit would take longer.

Array legend: K directions (forward, backward, or both). Constants except ``_RISES`` were compared with other values:
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
"""The smallest tolerance that is used. With a smaller tolerance, cuts add more time than they save."""
_RISES = (1, 1.25, 2.5, 6, 20)
"""How far limits are above targets, as multiples of the tolerance. They are tried one after the other, until no server
is above its limit."""
_MOST_OVERHEAD = 1.0
"""The most time that a cut may add, as a part of the time of the range that moves. This is much, but all servers wait
for the slowest."""

Growth = dict[Direction, np.ndarray]
"""For each ``direction`` of planning: [K] work of the previous plan after its cuts, divided by the work before its
cuts."""


def schedule_unlike(
    home: Plan,
    work: ServerWork,
    target: TargetLoad,
    tolerance: float,
    moved_bytes: tuple[int, int],
    links: Links,
    growth: Growth,
) -> Tasks:
    """Returns the tasks of one nano-batch, a part of a micro-batch. A task is a range of queries on one server.

    Args:
        home: the plan in which every rank computes its own rows.
        work: gives the seconds of a range on every server.
        target: how much work each server should get.
        tolerance: how far a server may be above its target, as a part of the mean load.
        moved_bytes: bytes that travel for each query row, and for each key/value row, that leaves its home rank.
        links: which ranks share a node, and prices of bytes between ranks.
        growth: how much cuts are expected to add. Limits include this work from the start, as otherwise servers count
            as full too early. The values of the new plan replace the given ones.
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
