"""Computes how much attention each server should get, so that all servers end at the same time.

A *server* is a rank that computes attention. ``scheduler.py`` moves attention until no server has much more than its
*target*. A target is lower if the server is slower, or has other work at the same time, such as linear layers.

Let server r take f_r times as long for attention as a server of mean speed. All servers with attention end at the same
time T if server r gets

    target_r = max(T − other_seconds_r, 0) / f_r      where the targets add up to all attention.

Attention is counted in seconds of a server of mean speed, for which f is 1 (the harmonic mean of all f_r is 1).
Example: two servers of equal speed have 6 seconds of attention together, and the first has 2 seconds of other work.
Both end at T = 4, with 2 and 4 seconds of attention.

If ``slowness`` is given, T is also at least the longest other work. Each target is what the server can end by T, so
targets may then add up to more than all attention.

**Two directions.** A plan may hold for forward and for backward. Then server r computes the same fraction φ_r of the
attention in both. With attention A_k in direction k and the end T_k of its slowest server,

    other_kr + f_kr · A_k · φ_r ≤ T_k      with Σ φ_r = 1.

The target of server r in direction k is the most attention that the server can end by T_k. So the targets of a
direction may add up to more than all attention. The plan should have the least T_forward + T_backward. For given times
T_k, φ_r can be at most min_k max(T_k − other_kr, 0) / (f_kr A_k). The times suffice if these fractions add up to at
least 1. First each T_k is the time that direction k alone needs. If these times do not suffice, a golden-section
search over T_forward finds the least sum. The search is right because the least T_backward is a convex function of
T_forward.

Array legend: K directions, R servers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distca.errors import PlanError

_SEARCHED = 24
"""Steps of the golden-section search. Each step shortens the interval to 0.618 of its length; 24 steps shorten it to a
100,000th."""
_GOLDEN = (5**0.5 - 1) / 2
_ROUNDING = 1e-9
"""Servers' fractions of attention count as all attention if their sum is below 1 by at most this."""


class TargetLoad:
    """The attention that each server should get.

    Args:
        other_seconds: [R] for one direction, [K, R] for two: seconds of other work on each server. None if all servers
            have equally much.
        slowness: [K, R] the factor f of each server; None if servers are equally fast.
        mean: [K] attention per server before tasks are cut; needed if servers are not equally fast, or for two
            directions.

    Attributes:
        alike: True if neither ``other_seconds`` nor ``slowness`` is given; then every target is the mean.

    Raises:
        PlanError: ``other_seconds`` have another shape, or a number is negative or not finite.
    """

    def __init__(
        self,
        servers: int,
        other_seconds: Sequence[float] | np.ndarray | None,
        slowness: np.ndarray | None = None,
        mean: np.ndarray | None = None,
    ) -> None:
        self._servers, self._slowness = servers, slowness
        self.alike = other_seconds is None and slowness is None
        self._other: np.ndarray | None = None
        if other_seconds is not None:
            self._other = _checked(np.asarray(other_seconds, np.float64), servers, 1 if mean is None else len(mean))
        self._times: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        if self.alike:
            return
        if slowness is None and (mean is None or len(mean) == 1):
            assert self._other is not None
            self._ascending = np.sort(self._other)
            self._spent = np.cumsum(self._ascending)
            return
        assert mean is not None
        other = (
            np.zeros((len(mean), servers))
            if self._other is None
            else np.broadcast_to(self._other, (len(mean), servers))
        )
        slow = np.ones_like(other) if slowness is None else slowness
        times = _least_times(mean * servers, other, slow)
        # Cuts will raise the mean, and the servers with attention do the added work. The last array of _times says how
        # many seconds later each direction ends for each second that the mean rises.
        takes_part = np.where(other < times[:, None], 1.0 / slow, 0.0).sum(axis=1)
        self._times = mean, times, servers / np.maximum(takes_part, 1.0 / slow.max(axis=1))
        self._other = other

    def of(self, mean: np.ndarray) -> np.ndarray:
        """Returns each server's target [K, R] for ``mean`` [K] attention per server; [K, 1] if all get the mean."""
        if self.alike:
            return mean[:, None]
        assert self._other is not None
        if self._times is not None:
            first, times, rise = self._times
            later = times + np.maximum(mean - first, 0.0) * rise
            return self.work_in(np.maximum(later[:, None] - self._other, 0.0))
        # done[k, n] is when direction k's attention ends if the n + 1 servers with least other work compute all of it.
        # The next server takes part if its other work ends before that time.
        done = ((mean * self._servers)[:, None] + self._spent) / np.arange(1, self._servers + 1)
        joined = (done > self._ascending).sum(axis=1) - 1
        last = done[np.arange(len(mean)), np.maximum(joined, 0)]
        return np.asarray(np.maximum(last[:, None] - self._other, 0.0))

    def tolerated(self, mean: np.ndarray) -> np.ndarray:
        """Returns [K] seconds. A server may exceed its target by the tolerance times these seconds.

        The seconds are ``mean``, the attention per server. If servers differ in speed, each direction gets the average
        of ``mean`` over directions."""
        return mean if self._slowness is None else np.full_like(mean, mean.mean())

    def work_in(self, seconds: np.ndarray) -> np.ndarray:
        """Returns the attention that each server does in ``seconds`` [K, R] or [K, 1].

        The result has the shape of ``seconds``, or [K, R] if servers differ in speed."""
        return seconds if self._slowness is None else np.asarray(seconds / self._slowness)

    def seconds_of(self, work: np.ndarray) -> np.ndarray:
        """Returns [K, R] seconds that each server takes for [K, R] attention ``work``."""
        return work if self._slowness is None else np.asarray(work * self._slowness)


def _checked(seconds: np.ndarray, servers: int, directions: int) -> np.ndarray:
    shapes = {1: ((servers,), (1, servers)), 2: ((2, servers),)}[directions]
    if seconds.shape not in shapes or not np.isfinite(seconds).all() or (seconds < 0).any():
        each = "" if directions == 1 else " for each direction"
        raise PlanError(f"other_seconds must be {servers} numbers of 0 or more{each}; got {seconds.tolist()}.")
    return seconds.reshape(servers) if directions == 1 else seconds


def _least_times(total: np.ndarray, other: np.ndarray, slowness: np.ndarray) -> np.ndarray:
    """Returns the [K] times T_k with the least sum, for ``total`` [K], the attention of all servers together."""
    # T_k is at least the longest other work in direction k, and at least the time that direction k alone needs. If
    # these times do not suffice, T_forward is searched between "low" and "high". With T_forward = "high", T_backward
    # is the least possible.
    some = np.flatnonzero(total > 0)
    least = other.max(axis=1)
    # For each direction with attention: when each server begins attention, and the fraction of all attention that the
    # server does per second.
    begin, speed = other[some], 1.0 / (slowness[some] * total[some, None])
    alone = np.array([_time_for(*each) for each in zip(begin, speed, strict=True)])
    least[some] = np.maximum(least[some], alone)
    if len(some) < 2 or _share(least, begin, speed).sum() >= 1 - _ROUNDING:
        return least

    def backward(forward: float) -> float:
        most = np.maximum(forward - begin[0], 0.0) * speed[0]
        return max(_time_for(begin[1], speed[1], most), float(least[1]))

    most = np.maximum(least[1] - begin[1], 0.0) * speed[1]
    low, high = float(least[0]), _time_for(begin[0], speed[0], most)
    inner = [high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)]
    sums = [each + backward(each) for each in inner]
    for _ in range(_SEARCHED):
        if sums[0] <= sums[1]:
            high = inner[1]
            inner = [high - _GOLDEN * (high - low), inner[0]]
            sums = [inner[0] + backward(inner[0]), sums[0]]
        else:
            low = inner[0]
            inner = [inner[1], low + _GOLDEN * (high - low)]
            sums = [sums[1], inner[1] + backward(inner[1])]
    best = inner[0] if sums[0] <= sums[1] else inner[1]
    return np.array((best, backward(best)))


def _share(times: np.ndarray, begin: np.ndarray, speed: np.ndarray) -> np.ndarray:
    """Returns [R] the fraction of all attention that each server can do in the ``times`` [K]."""
    return np.asarray((np.maximum(times[:, None] - begin, 0.0) * speed).min(axis=0))


def _time_for(begin: np.ndarray, speed: np.ndarray, most: np.ndarray | None = None) -> float:
    """Returns the earliest time at which servers have done all attention together, or each has done its ``most``.

    Server r begins at begin[r], does the fraction speed[r] of all attention per second, and stops after most[r]."""
    # The fraction done grows linearly between "edges": times at which a server begins, or has done its most.
    edges, change = begin, speed
    if most is not None:
        some = most > 0
        begin, speed, most = begin[some], speed[some], most[some]
        edges, change = np.concatenate((begin, begin + most / speed)), np.concatenate((speed, -speed))
    order = np.argsort(edges, kind="stable")
    edges, rate = edges[order], np.cumsum(change[order])
    done = np.append(0.0, np.cumsum(rate[:-1] * np.diff(edges)))
    at = int(np.searchsorted(done, 1.0)) - 1
    if at == len(edges) - 1 and most is not None:
        return float(edges[-1])
    return float(edges[at] + (1.0 - done[at]) / rate[at])
