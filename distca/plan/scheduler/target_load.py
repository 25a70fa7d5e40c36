"""How much attention each server should get: less where it has other work meanwhile.

In a pipeline's phase, stages with a micro-batch compute their linear layers between the attention of one layer and the
next; a stage without one has that time for attention. All servers are done at the same time T if server r gets

    target_r = max(T − other_seconds_r, 0)      where the targets add up to all attention.

Array legend: K directions, R servers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distca.errors import PlanError


class TargetLoad:
    """Seconds of attention that each server should get.

    Args:
        servers: R.
        other_seconds: [R] seconds of work other than attention on each server; None where it is the same for all.

    Raises:
        PlanError: on other numbers.
    """

    def __init__(self, servers: int, other_seconds: Sequence[float] | np.ndarray | None) -> None:
        self._servers = servers
        self.other_seconds: np.ndarray | None = None
        if other_seconds is None:
            return
        seconds = np.asarray(other_seconds, np.float64)
        if seconds.shape != (servers,) or not np.isfinite(seconds).all() or (seconds < 0).any():
            raise PlanError(f"other_seconds must be {servers} seconds of 0 or more; got {seconds.tolist()}.")
        self.other_seconds = seconds
        self._ascending = np.sort(seconds)
        self._spent = np.cumsum(self._ascending)

    def of(self, mean: np.ndarray) -> np.ndarray:
        """[K, R] seconds of attention for each server, of [K] ``mean`` seconds per server; [K, 1] if all get that."""
        if self.other_seconds is None:
            return mean[:, None]
        # The time at which all are done if only the n + 1 servers with the least other work take part; the next one
        # joins if its other work is done before that.
        done = ((mean * self._servers)[:, None] + self._spent) / np.arange(1, self._servers + 1)
        joined = (done > self._ascending).sum(axis=1) - 1
        last = done[np.arange(len(mean)), np.maximum(joined, 0)]
        return np.asarray(np.maximum(last[:, None] - self.other_seconds, 0.0))
