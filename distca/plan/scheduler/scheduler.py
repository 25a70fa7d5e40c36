"""The scheduler: it chooses the server that computes each range of queries, so that all servers end at about the same
time.

A *server* is a rank that computes attention; the *home* of a row is the rank that holds it. A *task* is a range of
query rows of one document on one server. ``phases.py`` calls :func:`schedule` for each *nano-batch*, the whole or one
of two parts of a micro-batch. At first every task is at home. Then work moves from servers above a limit to others, for
fewest bytes per second of work (``balancer.py``).

The scheduler is greedy, like that of the paper (arXiv 2510.18121, section 5.2). It differs in one thing: only a server
above its limit gives work away, and never more than its excess. So the slowest server's time itself is bounded; see
docs/planning.md.
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
"""How far above the mean load the slowest server may be, as a part of it. It was chosen from the curve of bytes over
tolerance in benchmarks/results/planner.md; below 0.01 bytes rise steeply."""

_FINEST_TOLERANCE = 0.005
"""The tolerance of small pools of servers. Finer plans gained less than 0.2 % of attention's time
(benchmarks/results/planner.md)."""
_SERVERS_OF_DEFAULT = 128
"""The number of servers from which plans for training have the default tolerance. With fewer servers it is
proportionally smaller."""

_AIM = 0.95
"""The part of the tolerance that the first try aims at. The rest is for time that ranges add when they are joined. With
1.0 the slowest server is 0.08 % slower; with 0.8 it is 0.24 % faster, but bytes grow by 0.8 %."""
_JOININGS = 3
"""How often one limit is tried at most. Ranges that met on a server are joined at the end of a try, which changes their
seconds. If a server takes longer by that, the next try begins with the joined ranges."""
_USUAL_TRIES = 4
"""The number of limits that are tried before cuts may add more work."""
_MORE_TOLERANCE = (0.004, 0.01, 0.03, 0.1, 0.3, 1.0, 2.0)
"""Numbers that are added to the tolerance, one after the other, if no plan keeps to the limit before. A kernel tile of
the longest document may be a few percent of the mean load. Every receiver then stays a little below its limit. A
slightly higher limit for all is better than one server that nobody can relieve."""
_MORE_OVERHEAD = 1.0
"""The time that a cut may add, as a part of the time that it moves, in the last tries. If ranks have few tokens, a
range that pays for its cut is up to a quarter of a server's backward. Shorter ranges add work. But a server that nobody
can relieve keeps all others waiting for longer (benchmarks/results/planner.md)."""
_LEAST_SLACK = 0.0003
"""How far a limit must be above the least imbalance that forward and backward allow together, in parts of the mean
load. Closer limits are not tried: a thousand moves would end just above them."""


def training_tolerance(servers: int) -> float:
    """Returns the tolerance of plans for training: 0.005 for up to 32 servers, growing with them to 0.02 from 128 on.

    In small pools a finer plan costs a few milliseconds of planning, which runs in the background, and some percent
    more bytes. Example: two ranks have one document each, as long as the context. With 0.02 the slower rank is 1.4 to
    1.8 % above the mean (benchmarks/results/planner.md)."""
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
    """Plans one nano-batch.

    Args:
        layout: the rows of each rank.
        cost: seconds per task.
        tolerance: how far above its fair share of the time a server may be, as a part of the mean load. A plan exceeds
            it if documents, and the shortest ranges that pay for their cut, leave no other way.
        direction: the direction that is balanced; "both" balances both with one common set of tasks.
        resend: whether homes send q, k, v and o again for backward, which changes the price of a moved row.
        links: which ranks share a node, and prices of bytes between ranks; None prices all pairs alike.
        other_seconds: seconds of other work than attention on every server, [R] for one direction, [2, R] for both. A
            server with less of it gets more attention, so that all end at the same time. None: all have equally much.
        growth: by direction, the factor by which cuts made all work grow in the plan before. It is used and updated if
            servers are not equally fast. None: nothing is known.

    Returns:
        A plan that computes every query row once; the same for the same arguments.

    Raises:
        PlanError: the tolerance is negative, or ``other_seconds`` cannot be used.
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
        # No plan was better than computing at home: one direction always lost more than the other gained. A finer plan
        # may be better.
        tolerance = max(tolerance / 2, _FINEST_TOLERANCE)
    return Plan(layout, search.best)


@dataclass
class _Search:
    """Tries limits until a plan keeps to one.

    Attributes:
        home: the plan that computes everything at home.
        work: the work of ranges on every server.
        target: how much work each server should get.
        moved_bytes: bytes of a query row and of a key/value row that is computed away from home.
        links: which ranks share a node, and prices of bytes between ranks.
        best: tasks of the fastest plan so far.
        lowest: its slowest server's seconds over the mean load.
        before: [K] seconds of the slowest server with everything at home.
        grown: [K] mean load after the last try, with the work that cuts added.
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
        """Tries limits, the first a little below ``tolerance``; returns False if a finer tolerance may give a better
        plan.

        First come a few limits, each higher than the one before. Then all limits are tried with costlier cuts. Limits
        below ``least`` are left out: forward and backward differ too much for them."""
        more = [tolerance, *(tolerance + each for each in _MORE_TOLERANCE)]
        usual = [_AIM * tolerance, *more[: _USUAL_TRIES - 1]]
        over = np.inf
        for tried, aim in enumerate((*usual, *more)):
            last = tried == len(usual) + len(more) - 1
            if (aim < least + _LEAST_SLACK and not last) or aim >= self.lowest - 1 > tolerance:
                continue
            # One of the first tries may end as soon as a server is stuck above the next try's limit.
            at_most = usual[min(tried + 1, len(usual) - 1)] if tried < len(usual) else np.inf
            # Cuts add work, and limits rise with the mean load. Servers that were filled before then have only a little
            # room again, too little for a range. So the last tries expect the work of the try before from the start.
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
        """Balances to one limit; returns how far above the mean load the slowest server then is, as a part of it.

        Args:
            aim: how far above the mean load the limit is.
            tolerance: how far above it a server may be for the plan to count as good.
            at_most: a server that is stuck further above it than this ends the try.
            overhead: most time that a cut may add, as a part of the time that it moves.
            expected: [K] mean load that the limit is computed from, if cuts are known to add work; else None.
        """
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
            # Forward and backward run one after the other, and may share tasks. So a plan is kept only if its slowest
            # servers, added over directions, are no slower than with everything at home.
            if slowest < self.lowest and state.slowest.sum() <= self.before.sum():
                self.best, self.lowest = tasks, slowest
            over = state.over
            if not state.grew_by_joining or over <= max(aim, tolerance) + ENOUGH:
                break
            # Joined ranges made a server slower: the next try begins with the ranges as they are now.
            start = Plan(self.home.layout, tasks)
        return over


def _least_imbalance(home: Plan, cost: CostModel, direction: Direction) -> float:
    """Returns about how far above the mean load the slowest server stays in any plan for both directions, as a part of
    it.

    A server may have more than the mean in backward and less in forward, or the other way round. The answer is the
    larger of both, in the mean over servers; it is 0 for plans of one direction."""
    seconds = [server_seconds(home, cost, way) for way in (("forward", "backward") if direction == "both" else ())]
    if not seconds:
        return 0.0
    return float(np.mean(np.max([each / max(float(each.mean()), 1e-300) for each in seconds], axis=0))) - 1
