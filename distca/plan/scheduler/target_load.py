"""What part of the work each server should get: by its speed, and by what else it computes meanwhile.

In a pipeline's phase, stages with a micro-batch compute their linear layers between the attention of one layer and the
next; a stage without one has that time for attention. Everybody is done at the same time T if server r gets

    share_r = speed_r · max(T − beside_r, 0)      with the shares adding up to all attention.

Array legend: K directions, R servers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distca.errors import PlanError


class Shares:
    """Deals seconds of attention to servers.

    Args:
        speeds: [R] relative speeds, 0 or more, at least one above 0.
        beside: [R] seconds that each server computes beside attention; None for alike.

    Raises:
        PlanError: on other numbers.
    """

    def __init__(self, speeds: np.ndarray, beside: Sequence[float] | np.ndarray | None) -> None:
        self.speeds, self.beside = speeds, None
        if beside is None:
            return
        seconds = np.asarray(beside, np.float64)
        if seconds.shape != speeds.shape or not np.isfinite(seconds).all() or (seconds < 0).any():
            raise PlanError(f"beside must be {len(speeds)} seconds of 0 or more; got {seconds.tolist()}.")
        # Those with least beside attention get their shares first.
        order = np.argsort(seconds, kind="stable")
        order = order[speeds[order] > 0]
        self.beside = seconds
        self._starts = seconds[order]
        self._speed = np.cumsum(speeds[order])
        self._spent = np.cumsum(speeds[order] * seconds[order])

    def of(self, mean: np.ndarray) -> np.ndarray:
        """[K, R] seconds of attention, for a server of speed 1, that each should get where one of speed 1 gets [K]
        ``mean`` if all that is beside is left out."""
        if self.beside is None:
            return np.asarray(mean[:, None] * self.speeds)
        total = mean * self.speeds.sum()
        # The time at which all are done if only the first n + 1 of them take part; the next joins if it could be done
        # with what it computes besides before that.
        done = (total[:, None] + self._spent) / self._speed
        joined = (done > self._starts).sum(axis=1) - 1
        last = done[np.arange(len(total)), np.maximum(joined, 0)]
        return np.asarray(self.speeds * np.maximum(last[:, None] - self.beside, 0.0))


def check_speeds(speeds: Sequence[float] | np.ndarray | None, ranks: int) -> np.ndarray:
    """[R] float64 relative speeds; raises PlanError on a wrong number, a negative one, or none above 0."""
    if speeds is None:
        return np.ones(ranks)
    speed = np.asarray(speeds, np.float64)
    if speed.shape != (ranks,) or not np.isfinite(speed).all() or (speed < 0).any() or not speed.any():
        raise PlanError(f"speeds must be {ranks} numbers of 0 or more, at least one above 0; got {speed.tolist()}.")
    return speed
