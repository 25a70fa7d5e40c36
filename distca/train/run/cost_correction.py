"""Learns from attention times how fast servers really are and what far-reaching tasks really cost, for the next plans.

GPUs of one kind differ by a few percent in what power and heat let them do, one that throttles by much more, and a
cost table errs by a few percent with the reach of tasks. Every rank learns the same from the same gathered times, so
all go on planning alike. Plans then depend on measured times: with cad.deterministic nothing is learned, nor on CPUs,
which ranks may share.

Where a pipeline fills or drains, servers of idle stages are up to 30 % faster than busy ones: their GPUs have power to
spare. So phases in which other stages are busy, or of the other direction, are learned apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from distca.plan.cost_correction import WHOLE_STEP, Learned, Learnings, PhaseKind, ServerWork
from distca.train.config.schema import RunConfig
from distca.train.data.plan_options import Planning
from distca.train.data.prefetch import StepInputs

_REMEMBER = 0.9  # weight of a step, against the next one's
_PRIOR_STEPS = 0.25  # so many steps that showed equal speeds count as seen before all others
_PRIOR_REACH = 0.05  # the same for no cost of reach: about one step in which two servers' reaches are 0.3 apart
_REACH_COSTS = (-0.05, 0.25)  # least and most; below, cuts seem to win so much that plans get worse
_SPEEDS = (0.5, 2.0)
_SURPRISES = (0.1, math.log(2.0))  # by how much a step may differ from what was learned: in the end, and at first
_LEAST_SHARE = 0.2  # of the mean work: what takes little time says little


class Learner:
    """Keeps what the steps so far showed, for each kind of phase.

    Args:
        servers: of the pool.
        learns: False never learns anything.

    Attributes:
        current: all that was learned; replaced, never changed.
    """

    def __init__(self, servers: int, learns: bool) -> None:
        self.current: Learnings = {}
        self._servers, self._learns = servers, learns
        self._fits: dict[PhaseKind, _Fit] = {}

    def learn_from(self, inputs: StepInputs, total: np.ndarray, by_phase: np.ndarray | None) -> None:
        """Take in a step that was trained.

        Args:
            inputs: what was planned.
            total: [servers] measured attention seconds.
            by_phase: [phases, servers] the same by phase, with pipeline stages; None where that is not known.
        """
        work = inputs.work
        if inputs.pipeline is None:
            whole = ServerWork(work.seconds.sum(axis=0, keepdims=True), work.reaching.sum(axis=0, keepdims=True))
            self.learn([WHOLE_STEP], whole, total[None])
        elif by_phase is not None:
            self.learn(inputs.pipeline.kinds, work, by_phase)

    def learn(self, kinds: Sequence[PhaseKind], work: ServerWork, measured: np.ndarray) -> None:
        """Take in a step. The first one, which compiles and warms up, does not count.

        Args:
            kinds: N, of the step's phases.
            work: [N, servers] what each server was given.
            measured: [N, servers] seconds that it took.
        """
        learned = {}
        for kind in dict.fromkeys(kinds) if self._learns else ():
            of_kind = np.array([each == kind for each in kinds])
            given, reaching, took = (each[of_kind].sum(axis=0) for each in (work.seconds, work.reaching, measured))
            if not (given.sum() > 0 and took.sum() > 0):
                continue
            if kind not in self._fits:
                self._fits[kind] = _Fit(self._servers)
                continue
            fit = self._fits[kind]
            fit.add(given, reaching, took)
            learned[kind] = fit.learned()
        self.current = {**self.current, **learned}


class _Fit:
    """Least squares over the steps of one kind, of log(measured / planned) of each server against the other servers':

        reach cost x (the server's mean reach, against the others') - log(the server's speed)

    Reach cannot be left out: servers that always get the ends of documents would look slow. Kept as running sums of
    each server's own steps, since not all have work in every step. A step that surprises counts only up to a limit,
    which shrinks as more is known, unless the next one does alike: one in which a server hung says little.
    """

    def __init__(self, servers: int) -> None:
        self._steps = np.full(servers, _PRIOR_STEPS)
        self._slow, self._reach, self._reach_squared, self._reach_slow, self._last = np.zeros((5, servers))
        self._reach_cost, self._typical, self._phases = 0.0, 0.0, 0.0

    def add(self, given: np.ndarray, reaching: np.ndarray, took: np.ndarray) -> None:
        known = (given >= _LEAST_SHARE * given.mean()) & (took > 0)
        if known.sum() < 2:
            return
        steps = self._steps[known]
        usual_slow, usual_reach = self._slow[known] / steps, self._reach[known] / steps
        reach = reaching[known] / given[known]
        # Only differences between servers count, and these are some of all servers.
        reach += usual_reach.mean() - reach.mean()
        expected = usual_slow + self._reach_cost * (reach - usual_reach)
        surprise = np.log(took[known] / given[known]) - expected
        surprise -= np.median(surprise)
        believed, odd = self._believed(surprise, known)
        # What all have in common says nothing of differences; left in, it would add up.
        believed -= np.average(believed, weights=steps)
        # A server's odd step says nothing of reach: it counts as at the server's usual one.
        reach, slow = np.where(odd, usual_reach, reach), np.where(odd, usual_slow, expected) + believed
        sums = (self._steps, self._slow, self._reach, self._reach_squared, self._reach_slow)
        for each, newest in zip(sums, (1.0, slow, reach, reach**2, reach * slow), strict=True):
            each[known] = _REMEMBER * each[known] + newest
        self._typical = _REMEMBER * self._typical + reaching[known].sum() / given[known].sum()
        self._phases = _REMEMBER * self._phases + 1.0
        # Every server's slowness is its mean residual; put in, that leaves one equation for the cost of reach.
        among = float((self._reach_squared - self._reach**2 / self._steps).sum())
        common = float((self._reach_slow - self._reach * self._slow / self._steps).sum())
        self._reach_cost = float(np.clip(common / (among + _PRIOR_REACH), *_REACH_COSTS))

    def _believed(self, surprise: np.ndarray, known: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How much of each known server's surprise counts, and where that is not all of it."""
        least, most = _SURPRISES
        limit = np.clip(most / self._steps[known], least, most)
        # What a server shows twice is no accident.
        last, self._last[known] = self._last[known], surprise
        again = np.where(surprise * last > 0, np.minimum(np.abs(surprise), np.abs(last)), 0.0)
        limit = np.clip(again, limit, most)
        return np.clip(surprise, -limit, limit), np.abs(surprise) > limit

    def learned(self) -> Learned:
        speeds = np.exp((self._reach_cost * self._reach - self._slow) / self._steps)
        speeds = np.clip(speeds / speeds.mean(), *_SPEEDS)
        typical = self._typical / max(self._phases, 1.0)
        # Rounded: all ranks must plan with the same numbers, and the last bits of a sum may depend on the CPU.
        return Learned(np.round(speeds / speeds.mean(), 4), round(self._reach_cost, 4), round(float(typical), 3))


def learns(config: RunConfig, device: torch.device) -> bool:
    """Whether a run learns from measured times."""
    return config.cad.enabled and not config.cad.deterministic and device.type == "cuda"


def by_server(planning: Planning, mine: Sequence[float]) -> np.ndarray:
    """Gather figures from all ranks; every rank calls it.

    Args:
        planning: this rank's place.
        mine: K figures of this rank.

    Returns:
        [servers, K] float64. A server's tensor-parallel ranks compute the same tasks for other heads: the largest
        counts.
    """
    row = torch.tensor([planning.pool_rank, *mine], dtype=torch.float64)
    everyone = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, row)
    figures = np.zeros((planning.pool_ranks, len(mine)))
    for each in everyone:
        server = int(each[0])
        figures[server] = np.maximum(figures[server], each[1:].numpy())
    return figures
