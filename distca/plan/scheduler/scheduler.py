"""Chooses the server that computes each range of queries, so that all servers end at about the same time.

For layers without a window, ``phases.py`` calls :func:`schedule` for each *nano-batch*: a whole micro-batch, or one of
its two parts. With pipeline stages, one call is for all stages that run such layers at the same time.

- A *server* is a rank that computes attention. The *home* of a row (a token) is the rank that holds the row.
- A *task* is a range of query rows of one document on one server. At first every task is at home.
- A server's *load* is its seconds of attention. Its *target* is the load that it should have (``target_load.py``), and
  its *limit* is the target plus a fraction of the mean load.

``balancer.py`` moves ranges, whole or in part, from servers above their limit to other servers. :class:`_Search` tries
rising limits: first with cuts that add little time, then again with cuts that may add more. A try suffices if no server
is above its limit, or if none is above its target by more than the tolerance. The scheduler is greedy, as in
arXiv 2510.18121, section 5.2.

Array legend: R servers, K directions (forward and backward, or one of them). ``benchmarks/planner_constants.py``
compares constants with other values; benchmarks/results/planner.md has the results.
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
"""How far a server's load may be above its target, as a fraction of the mean load. Below 0.01 many more bytes travel
between ranks."""

_FINEST_TOLERANCE = 0.005
"""The least tolerance that :func:`training_tolerance` returns. A smaller tolerance saved at most 0.2 % of attention's
time."""
_SERVERS_OF_DEFAULT = 128
"""The least number of servers for which :func:`training_tolerance` returns ``DEFAULT_TOLERANCE``. With few servers a
finer plan costs only a few milliseconds of planning and some percent more bytes."""

_AIM = 0.95
"""The first limit is this fraction of the tolerance above the target. The rest is for the time that may be added when
adjacent ranges of a server become one task. With 0.8 the slowest server is 0.24 % faster, and 0.8 % more bytes travel.
"""
_JOININGS = 3
"""The most rounds of moving and joining with one limit. A further round is run if joining made a server slower."""
_USUAL_TRIES = 4
"""The number of limits that are tried before cuts may add the time ``_MORE_OVERHEAD``."""
_MORE_TOLERANCE = (0.004, 0.01, 0.03, 0.1, 0.3, 1.0, 2.0)
"""Later limits are the tolerance plus each of these fractions of the mean load. A small limit may be out of reach: one
kernel tile of a long document can take a few percent of the mean load."""
_MORE_OVERHEAD = 1.0
"""The time that a cut may add in later tries, as a fraction of the time of the range that moves."""
_LEAST_SLACK = 0.0003
"""How far a limit must be above :func:`_least_imbalance` to be tried, as a fraction of the mean load. Closer limits
take very many moves. The last limit may be closer."""


def training_tolerance(servers: int) -> float:
    """Returns the tolerance of plans for training: 0.005 for up to 32 servers, 0.02 for 128 or more, linear between."""
    return min(max(DEFAULT_TOLERANCE * servers / _SERVERS_OF_DEFAULT, _FINEST_TOLERANCE), DEFAULT_TOLERANCE)


def schedule(
    layout: Layout,
    cost: CostModel,
    *,
    tolerance: float = DEFAULT_TOLERANCE,
    direction: Direction = "both",
    resend: bool = False,
    sinks: bool = False,
    links: Links | None = None,
    other_seconds: Sequence[float] | np.ndarray | None = None,
    growth: Growth | None = None,
) -> Plan:
    """Plans one nano-batch.

    Args:
        tolerance: how far a server may be above its target, as a fraction of the mean load. A plan may exceed the
            tolerance, for example if every range that could move is too short to be worth it.
        direction: the direction that is balanced; "both" finds one set of tasks for forward and backward.
        resend: whether homes send q, k and v again for backward.
        sinks: whether heads have sinks, learned scores in the softmax.
        links: which ranks share a node, and how long bytes take between ranks; None if they take equally long between
            all ranks.
        other_seconds: seconds of other work than attention on every server, [R] for one direction, [2, R] for both. A
            server with less other work gets more attention. None if all servers have equally much.
        growth: maps a ``direction`` to [K] factors, by which cuts raised the sum of all tasks' seconds in the previous
            plan. If ``cost`` is a ``PoolCost``, the factors are used, and this plan's factors replace them in the dict.
            Otherwise the dict is ignored. None, or no entry, stands for factors of 1.

    Returns:
        A plan that computes every query row once. Equal arguments give equal plans.

    Raises:
        PlanError: the tolerance is negative, or ``other_seconds`` has a wrong shape or value.
    """
    if not tolerance >= 0:
        raise PlanError(f"tolerance is {tolerance}; it must be 0 or more.")
    home = plan_at_home(layout)
    rows, ends = home.tasks.stop - home.tasks.start, home.tasks.stop
    work = ServerWork.of(cost, direction, rows, ends)
    mean = work.on(home.tasks.server, rows, ends).sum(axis=1) / layout.ranks
    target = TargetLoad(layout.ranks, other_seconds, work.slowness, mean)
    least = _least_imbalance(home, cost, direction) if target.alike else 0.0
    moved_bytes, links = cost.shape.moved_bytes(direction, resend, sinks), links or Links()
    if work.slowness is not None:
        growth = {} if growth is None else growth
        return Plan(layout, schedule_unlike(home, work, target, tolerance, moved_bytes, links, growth))
    search = _Search(home, work, target, moved_bytes, links)
    while not search.run(tolerance, least) and tolerance > _FINEST_TOLERANCE:
        # No plan was better than computing at home. A finer tolerance may give a better plan.
        tolerance = max(tolerance / 2, _FINEST_TOLERANCE)
    return Plan(layout, search.best)


@dataclass
class _Search:
    """Tries limits, each for a whole plan, until a plan has no server above its limit or the tolerance.

    Attributes:
        moved_bytes: bytes that travel for a query row, and for a key/value row, that leaves its home.
        lowest: :meth:`SchedulerState.figure` of ``best``: the slowest server's seconds, over the mean load before work
            moved. So seconds that cuts add to all servers count too. If a limit takes several rounds, a later round
            divides by the mean load at its beginning, with the cuts of the rounds before.
        before: [K] :attr:`SchedulerState.slowest` of ``home``.
        grown: [K] mean load after the newest try; cuts raise it.
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
        """Tries a few rising limits, and then the tolerance and higher limits with costlier cuts.

        Limits that are no better than the best plan are left out. ``least`` is :func:`_least_imbalance`. Returns False
        if a finer tolerance may give a better plan."""
        more = [tolerance, *(tolerance + each for each in _MORE_TOLERANCE)]
        usual = [_AIM * tolerance, *more[: _USUAL_TRIES - 1]]
        over = np.inf
        for tried, aim in enumerate((*usual, *more)):
            last = tried == len(usual) + len(more) - 1
            if (aim < least + _LEAST_SLACK and not last) or aim >= self.lowest - 1 > tolerance:
                continue
            # A usual try ends early if no range can leave a server that is above the next usual try's limit. The last
            # usual try has no next one, so its own limit counts.
            at_most = usual[min(tried + 1, len(usual) - 1)] if tried < len(usual) else np.inf
            # Cuts add work, so the mean load and the limits rise while work moves. Servers that were filled early then
            # have room again, but too little for a range. So from the second try with costlier cuts on, limits are
            # computed from the mean load after the try before.
            expected = self.grown if tried > len(usual) else None
            overhead = MOST_OVERHEAD if tried < len(usual) else _MORE_OVERHEAD
            over = self._at_limit(aim, tolerance, at_most, overhead, expected)
            if over <= max(aim, tolerance) + ENOUGH:
                break
        if over > tolerance + ENOUGH:
            logger.debug("A tolerance of %.3f was wanted; the last plan that was tried has %.3f.", tolerance, over)
            return True
        return self.best is not self.home.tasks or self.lowest <= 1 + tolerance

    def _at_limit(
        self, aim: float, tolerance: float, at_most: float, overhead: float, expected: np.ndarray | None
    ) -> float:
        """Balances to one limit; returns the most that a server is then above its target.

        The result, ``aim``, ``tolerance`` and ``at_most`` are fractions of the mean load.

        Args:
            aim: how far the limit is above the target.
            at_most: balancing ends if no range can leave a server that is further above its target than this.
            expected: [K] least mean load to compute the limit from; None for the present mean load.
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
            # Forward and backward run one after the other, so the sum of both slowest servers' times must not grow.
            if slowest < self.lowest and state.slowest.sum() <= self.before.sum():
                self.best, self.lowest = tasks, slowest
            over = state.over
            if not state.grew_by_joining or over <= max(aim, tolerance) + ENOUGH:
                break
            start = Plan(self.home.layout, tasks)
        return over


def _least_imbalance(home: Plan, cost: CostModel, direction: Direction) -> float:
    """Estimates how far the best plan's slowest server is above the mean load, as a fraction of the mean load.

    For "both" a server with the mean load in one direction may have more in the other. Moves of ranges change this
    difference little. So for each direction, a server's load at home is divided by the mean load. The larger of the two
    quotients counts. The estimate is the mean of these larger quotients over servers, minus 1. For one direction the
    result is 0."""
    seconds = [server_seconds(home, cost, way) for way in (("forward", "backward") if direction == "both" else ())]
    if not seconds:
        return 0.0
    return float(np.mean(np.max([each / max(float(each.mean()), 1e-300) for each in seconds], axis=0))) - 1
