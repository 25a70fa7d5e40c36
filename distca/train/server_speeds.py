"""How fast attention servers really are, learned from what they took; plans give the faster ones more.

GPUs of one kind differ by a few percent in what power and heat let them do, one that throttles by much more, and a
cost table errs. Every rank learns the same speeds from the same gathered times, so all go on planning alike. Plans then
depend on measured times: with cad.deterministic nothing is learned, nor on CPUs, which ranks may share.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from distca.train.planning import Planning
from distca.train.settings import RunConfig

_FORGET = 0.1  # weight of the newest step, once there were as many as make it smaller than its share of all
_BOUNDS = (0.5, 2.0)
_LEAST_SHARE = 0.2  # of the mean work: what takes little time says little about speed


class ServerSpeeds:
    """Running mean of what each server computes per second, against the mean of all.

    Args:
        servers: of the pool.
        learn: False keeps all speeds equal.

    Attributes:
        current: [servers] float64 relative speeds with mean 1; None while nothing was learned.
    """

    def __init__(self, servers: int, learn: bool) -> None:
        self.current: np.ndarray | None = None
        self._servers, self._learn, self._steps = servers, learn, 0

    def learn(self, work: np.ndarray, measured: np.ndarray) -> None:
        """Take in a step. The first one, which compiles and warms up, does not count.

        Args:
            work: [servers] planned seconds, for a server of speed 1, of what each was given.
            measured: [servers] seconds that it took.
        """
        if not self._learn or not work.sum() > 0 or not measured.sum() > 0:
            return
        self._steps += 1
        if self._steps == 1:
            return
        before = np.ones(self._servers) if self.current is None else self.current
        known = (work >= _LEAST_SHARE * work.mean()) & (measured > 0)
        seen = before.copy()
        seen[known] = work[known] / measured[known] * (measured[known].sum() / work[known].sum())
        # Equal speeds count as one step that was seen before all others.
        weight = max(_FORGET, 1 / self._steps)
        speeds = np.clip((1 - weight) * before + weight * seen, *_BOUNDS)
        # Rounded: all ranks must plan with the same numbers, and the last bits of a sum may depend on the CPU.
        self.current = np.round(speeds / speeds.mean(), 4)


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
