"""How fast attention servers really are, learned from what they took; plans give the faster ones more.

GPUs of one kind differ by a few percent in what power and heat let them do, one that throttles by much more, and a
cost table errs. Every rank learns the same speeds from the same gathered times, so all go on planning alike. Plans then
depend on measured times: with cad.deterministic nothing is learned, nor on CPUs, which ranks may share.

Where a pipeline fills or drains, servers of idle stages are up to 30 % faster than busy ones: their GPUs have power to
spare, and they get long pieces of long documents. So phases in which other stages are busy, or of the other direction,
have speeds of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from distca.plan.speeds import WHOLE_STEP, PhaseKind, Speeds
from distca.train.planning import Planning
from distca.train.settings import RunConfig
from distca.train.step_inputs import StepInputs

_FORGET = 0.1  # weight of the newest step, once there were as many as make it smaller than its share of all
_PRIOR = 0.25  # equal speeds count as so many steps that were seen before all others
_BOUNDS = (0.5, 2.0)
_LEAST_SHARE = 0.2  # of the mean work: what takes little time says little about speed


class ServerSpeeds:
    """Running mean, for each kind of phase, of what each server computes per second, against the mean of all.

    Args:
        servers: of the pool.
        learn: False keeps all speeds equal.

    Attributes:
        current: all that was learned; replaced, never changed.
    """

    def __init__(self, servers: int, learn: bool) -> None:
        self.current: Speeds = {}
        self._servers, self._learn = servers, learn
        self._steps: Counter[PhaseKind] = Counter()

    def learn_from(self, inputs: StepInputs, total: np.ndarray, by_phase: np.ndarray | None) -> None:
        """Take in a step that was trained.

        Args:
            inputs: what was planned.
            total: [servers] measured attention seconds.
            by_phase: [phases, servers] the same by phase, with pipeline stages; None where that is not known.
        """
        if inputs.pipeline is None:
            self.learn([WHOLE_STEP], inputs.work.sum(axis=0, keepdims=True), total[None])
        elif by_phase is not None:
            self.learn(inputs.pipeline.kinds, inputs.work, by_phase)

    def learn(self, kinds: Sequence[PhaseKind], work: np.ndarray, measured: np.ndarray) -> None:
        """Take in a step. The first one, which compiles and warms up, does not count.

        Args:
            kinds: N, of the step's phases.
            work: [N, servers] planned seconds, for a server of speed 1, of what each was given.
            measured: [N, servers] seconds that it took.
        """
        learned = {}
        for kind in dict.fromkeys(kinds) if self._learn else ():
            of_kind = np.array([each == kind for each in kinds])
            given, took = work[of_kind].sum(axis=0), measured[of_kind].sum(axis=0)
            if given.sum() > 0 and took.sum() > 0:
                self._steps[kind] += 1
                if self._steps[kind] > 1:
                    learned[kind] = self._updated(kind, given, took)
        self.current = {**self.current, **learned}

    def _updated(self, kind: PhaseKind, work: np.ndarray, measured: np.ndarray) -> np.ndarray:
        before = self.current.get(kind, np.ones(self._servers))
        known = (work >= _LEAST_SHARE * work.mean()) & (measured > 0)
        seen = before.copy()
        seen[known] = work[known] / measured[known] * (measured[known].sum() / work[known].sum())
        weight = max(_FORGET, 1 / (self._steps[kind] - 1 + _PRIOR))
        speeds = np.clip((1 - weight) * before + weight * seen, *_BOUNDS)
        # Rounded: all ranks must plan with the same numbers, and the last bits of a sum may depend on the CPU.
        rounded: np.ndarray = np.round(speeds / speeds.mean(), 4)
        return rounded


def learns_speeds(config: RunConfig, device: torch.device) -> bool:
    """Whether a run learns its servers' speeds."""
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
