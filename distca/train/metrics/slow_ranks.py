"""The search for a GPU that is slower than the others. It compares the seconds of a GPU's attention with the work that
the plan gave it.

Waits are no part of those seconds, so a rank that waits for a slow one is not slow itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

STEPS = 20
"""Newest steps that count: single steps say little, as no cost table is exact for every shape."""
_MARGIN = 0.05
_WARM_UP = 2
_LEAST_SPEED = 0.01
"""A speed of 0, to which a very slow one would be rounded, is refused."""


class SlowRanks:
    """Watches over the speed of ranks.

    Attributes:
        slower: [ranks] how much longer each took for its work than the median of the others, over the last steps: 0.1
            is 10 % longer; NaN where it had none. None until enough steps are done.
        named: the ranks that are slower by more than 5 % now.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=STEPS)
        self._seen = 0
        self.named: set[int] = set()
        self.slower: np.ndarray | None = None

    def add(self, measured: np.ndarray, planned: np.ndarray) -> list[int]:
        """Take in a step.

        Args:
            measured: [ranks] seconds.
            planned: [ranks] what the plan reckons for the same work.

        Returns:
            Ranks that are slower than the others by more than 5 % now and were not before.
        """
        self._seen += 1
        if self._seen <= _WARM_UP or len(measured) < 2:
            return []
        self._steps.append((measured, planned))
        if len(self._steps) < STEPS:
            return []
        took, given = (np.sum(column, axis=0) for column in zip(*self._steps, strict=True))
        pace = np.divide(took, given, out=np.full(len(took), np.nan), where=given > 0)
        self.slower = np.array([each / _median_of_others(pace, rank) - 1 for rank, each in enumerate(pace)])
        slow = set(np.flatnonzero(self.slower > _MARGIN).tolist())
        new, self.named = sorted(slow - self.named), slow
        return new


def speeds_as_measured(
    speeds: Sequence[float], server_of_rank: Sequence[int], slower: np.ndarray, named: Sequence[int]
) -> list[float]:
    """The speeds by which plans count with the slow ranks that were found.

    Args:
        speeds: [servers] the speeds by which plans were made.
        server_of_rank: [ranks] each rank's place in the pool of servers.
        slower: [ranks] how much longer each takes for its work than the others, as in :class:`SlowRanks`.
        named: the ranks that are slower. Other ranks' servers keep their speeds.
    """
    found = list(speeds)
    for rank in named:
        server = server_of_rank[rank]
        slow = round(speeds[server] / (1 + float(slower[rank])), 2)
        found[server] = min(found[server], max(slow, _LEAST_SPEED))
    return found


def _median_of_others(pace: np.ndarray, rank: int) -> float:
    others = np.delete(pace, rank)
    others = others[~np.isnan(others)]
    return float(np.median(others)) if len(others) else float("nan")
