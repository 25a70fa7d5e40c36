"""The scheduler: which server computes which CA-task, so that every server is done at about the same time.

It is a greedy like the paper's (arXiv 2510.18121, section 5.2). It starts with every shard at home and moves work from
loaded to idle servers by best time per byte (``balancer.py``). It differs in one thing: only a server above its limit
gives work away, and never more than its excess. So the makespan itself is bounded; see docs/planning.md.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from distca.errors import PlanError
from distca.plan.cost.model import CostModel, Direction
from distca.plan.cost.pool import ServerWork
from distca.plan.layout import Layout
from distca.plan.metrics import server_seconds
from distca.plan.network import Links
from distca.plan.plan import Plan, plan_at_home
from distca.plan.scheduler.balancer import ENOUGH, Balancer
from distca.plan.scheduler.range_split import MOST_OVERHEAD, Timer
from distca.plan.scheduler.state import SchedulerState
from distca.plan.scheduler.target_load import TargetLoad
from distca.plan.scheduler.unlike import Growth, schedule_unlike
from distca.plan.tasks import Tasks

logger = logging.getLogger(__name__)

DEFAULT_TOLERANCE = 0.02
"""How far above the mean the slowest server may be; it was chosen from a curve in benchmarks/results/planner.md."""

_FINEST_TOLERANCE, _SERVERS_OF_DEFAULT = 0.005, 128

_AIM = 0.95
_JOININGS = 3
"""Times that ranges are balanced again after those that touch were joined."""
_USUAL_TRIES = 4
"""Limits that are tried before cuts may add more work."""
_MORE_TOLERANCE = (0.004, 0.01, 0.03, 0.1, 0.3, 1.0, 2.0)
"""Additions to the tolerance, tried in turn. A block of the longest document may be a few percent of the mean load.
Then every receiver is left a little short of its limit. A slightly higher limit for all gives a lower makespan then
than one server that nobody can relieve."""
_MORE_OVERHEAD = 1.0
"""Share of the time it moves that a cut may add, tried before more tolerance. Where budgets are small a shard that pays
for its cut is a quarter of a server's backward: shorter ones add work, but a server that nobody can relieve keeps all
others waiting for longer."""
_LEAST_SLACK = 0.0003
"""A limit so little above what forward and backward disagree about is not tried: a thousand moves would miss it."""


def training_tolerance(servers: int) -> float:
    """The tolerance that training plans with: 0.005 for up to 32 servers, growing with them to 0.02 from 128 on.

    In small pools a finer plan costs a few milliseconds in the background and some percent more bytes. Without it a
    full context's attention on two ranks is left a whole tolerance apart (benchmarks/results/planner.md).
    """
    return min(max(DEFAULT_TOLERANCE * servers / _SERVERS_OF_DEFAULT, _FINEST_TOLERANCE), DEFAULT_TOLERANCE)


def schedule(
    layout: Layout,
    cost: CostModel,
    *,
    tolerance: float = DEFAULT_TOLERANCE,
    direction: Direction = "both",
    resend: bool = False,
    links: Links | None = None,
    other_seconds: Sequence[float] | np.ndarray | None = None,
    growth: Growth | None = None,
) -> Plan:
    """Plan one nano-batch.

    Args:
        layout: where the rows live.
        cost: seconds per CA-task.
        tolerance: no server may be more than this fraction above its fair share of the time, where the documents and
            the shortest worthwhile shards allow it.
        direction: balance the forward, the backward, or each of them with one common set of tasks.
        resend: whether backward resends q, k, v, o (changes what a moved row costs).
        links: prices of bytes between ranks; None prices all pairs alike.
        other_seconds: seconds of work other than attention on every server, [R] for one direction, [2, R] for both:
            a server with less of it gets more attention, so that all are done at the same time. None means all alike.
        growth: that servers which are not alike had in the plan before; this plan's is noted in it. None knows nothing.

    Returns:
        A plan that computes every query row once; the same for the same arguments.

    Raises:
        PlanError: on a negative tolerance, or unusable ``other_seconds``.
    """
    if not tolerance >= 0:
        raise PlanError(f"tolerance is {tolerance}; it must be 0 or more.")
    home = plan_at_home(layout)
    rows, ends = home.tasks.stop - home.tasks.start, home.tasks.stop
    work = ServerWork.of(cost, direction, rows, ends)
    mean = work.on(home.tasks.server, rows, ends).sum(axis=1) / layout.ranks
    target = TargetLoad(layout.ranks, other_seconds, work.slowness, mean)
    least = _least_imbalance(home, cost, direction) if target.alike else 0.0
    moved_bytes, links = cost.shape.moved_bytes(direction, resend), links or Links()
    if work.slowness is not None:
        growth = {} if growth is None else growth
        return Plan(layout, schedule_unlike(home, work, target, tolerance, moved_bytes, links, growth))
    search = _Search(home, work, target, moved_bytes, links)
    while not search.run(tolerance, least) and tolerance > _FINEST_TOLERANCE:
        # One direction lost more than the other gained: a finer plan may be better for both.
        tolerance = max(tolerance / 2, _FINEST_TOLERANCE)
    return Plan(layout, search.best)


@dataclass
class _Search:
    """Tries limits until a plan keeps to one.

    Attributes:
        home: the plan that computes everything at home.
        work: of ranges on every server.
        target: how much of it each should get.
        moved_bytes: of a query row and of a key/value row that is computed away from home.
        links: as of :func:`schedule`.
        best: tasks of the fastest plan so far.
        lowest: its slowest server's load over the mean one.
        before: [K] slowest at home.
        grown: [K] mean seconds of a server after the last try.
    """

    home: Plan
    work: ServerWork
    target: TargetLoad
    moved_bytes: tuple[int, int]
    links: Links
    best: Tasks = field(init=False)
    lowest: float = np.inf
    before: np.ndarray = field(init=False)
    grown: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.best = self.home.tasks

    def run(self, tolerance: float, least: float) -> bool:
        """Try limits from a little under ``tolerance`` on. Limits below ``least`` are left out, because forward and
        backward differ too much to leave room for them. Returns whether a plan was found or none kept to it."""
        more = [tolerance, *(tolerance + each for each in _MORE_TOLERANCE)]
        usual = [_AIM * tolerance, *more[: _USUAL_TRIES - 1]]
        over = np.inf
        for tried, aim in enumerate((*usual, *more)):
            last = tried == len(usual) + len(more) - 1
            if (aim < least + _LEAST_SLACK and not last) or aim >= self.lowest - 1 > tolerance:
                continue
            # Once one server is left above what comes next, these tries need not see to the others.
            at_most = usual[min(tried + 1, len(usual) - 1)] if tried < len(usual) else np.inf
            # Cuts add work: a limit that only grows with it leaves those who were filled first with crumbs of room.
            expected = self.grown if tried > len(usual) else None
            overhead = MOST_OVERHEAD if tried < len(usual) else _MORE_OVERHEAD
            over = self._at_limit(aim, tolerance, at_most, overhead, expected)
            if over <= max(aim, tolerance) + ENOUGH:
                break
        if over > tolerance + ENOUGH:
            logger.debug("A tolerance of %.3f was wanted; the plan found has %.3f.", tolerance, over)
            return True
        return self.best is not self.home.tasks or self.lowest <= 1 + tolerance

    def _at_limit(
        self, aim: float, tolerance: float, at_most: float, overhead: float, expected: np.ndarray | None
    ) -> float:
        """Balance to ``aim`` above the mean, or the ``expected`` one, with cuts of at most so much ``overhead``; a
        server that stays ``at_most`` above it ends it. Returns how far above the mean the slowest server then is."""
        start, over = self.home, np.inf
        for _ in range(_JOININGS):
            state = SchedulerState(start, self.work, self.target, tolerance=aim, links=self.links, expected=expected)
            unit = np.maximum(state.mean, 1e-300)
            if start is self.home:
                self.before = state.slowest
                self.lowest = min(self.lowest, state.figure(unit))
            timer = Timer(self.work, unit.tolist(), overhead)
            Balancer(state, timer, *self.moved_bytes).run(at_most, tolerance)
            tasks = state.joined()
            self.grown = state.mean
            slowest = state.figure(unit)
            # Forward and backward run apart: where they share their tasks, the one must not gain less than the other
            # loses.
            if slowest < self.lowest and state.slowest.sum() <= self.before.sum():
                self.best, self.lowest = tasks, slowest
            over = state.over
            if not state.grew_by_joining or over <= max(aim, tolerance) + ENOUGH:
                break
            # Ranges that met on a server take longer as one: balance them as they are now.
            start = Plan(self.home.layout, tasks)
        return over


def _least_imbalance(home: Plan, cost: CostModel, direction: Direction) -> float:
    """About how far above the mean the slowest server stays where forward and backward differ about every server's
    work: the mean of its larger one."""
    seconds = [server_seconds(home, cost, way) for way in (("forward", "backward") if direction == "both" else ())]
    if not seconds:
        return 0.0
    return float(np.mean(np.max([each / max(float(each.mean()), 1e-300) for each in seconds], axis=0))) - 1
