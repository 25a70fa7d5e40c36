"""How much attention each server should get: less where it has other work meanwhile, or is slower.

In a pipeline's phase, stages with a micro-batch compute their linear layers between the attention of one layer and the
next; a stage without one has that time for attention, as has a server without a model. Server r takes f_r times as long
as the mean one for the same attention. All servers are done at the same time T if server r gets the attention

    target_r = max(T − other_seconds_r, 0) / f_r      where the targets add up to all attention.

Attention is counted in seconds of a mean server: the harmonic mean of f is 1, so without other work T is the mean, and
a server slower by f gets 1/f of the work. No plan is done before the slowest home's other work is, so where servers are
not alike T is at least that: what can be computed meanwhile costs nobody time, and need not move.

**Two directions.** Where servers keep rows, forward and backward share their tasks: server r has the same share φ_r of
both, and each direction is done when its slowest server is. The times T_k of a direction with A_k attention in all obey

    other_kr + f_kr · A_k · φ_r ≤ T_k      with Σ φ_r = 1,

and the plan should have the least T_forward + T_backward. For given times a server may have the share
min_k max(T_k − other_kr, 0) / (f_kr A_k), and the shares must add up to 1 at least. If the times that each direction
could have alone allow that, they are it. Else the least T_backward is a convex, falling function of T_forward, and the
sum's minimum is found by a golden-section search. Limits are T_k − other_kr.

Array legend: K directions, R servers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distca.errors import PlanError

_SEARCHED = 24
"""Steps of the golden-section search: the last one is a 100,000th of the first."""
_GOLDEN = (5**0.5 - 1) / 2
_ROUNDING = 1e-9


class TargetLoad:
    """Attention that each server should get.

    Args:
        servers: R.
        other_seconds: [R], or [K, R] by direction: seconds of work other than attention on each server; None where it
            is the same for all.
        slowness: [K, R] seconds of a server per second of work; None where servers are alike.
        mean: [K] attention per server at first; needed where servers are not alike, or for several directions.

    Raises:
        PlanError: on other numbers.
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
        # Work that cuts add goes to all who take part.
        takes_part = np.where(other < times[:, None], 1.0 / slow, 0.0).sum(axis=1)
        self._times = mean, times, servers / np.maximum(takes_part, 1.0 / slow.max(axis=1))
        self._other = other

    def of(self, mean: np.ndarray) -> np.ndarray:
        """[K, R] attention for each server, of [K] ``mean`` per server; [K, 1] if all get that."""
        if self.alike:
            return mean[:, None]
        assert self._other is not None
        if self._times is not None:
            first, times, rise = self._times
            later = times + np.maximum(mean - first, 0.0) * rise
            return self.work_in(np.maximum(later[:, None] - self._other, 0.0))
        # The time at which all are done if only the n + 1 servers with the least other work take part; the next one
        # joins if its other work is done before that.
        done = ((mean * self._servers)[:, None] + self._spent) / np.arange(1, self._servers + 1)
        joined = (done > self._ascending).sum(axis=1) - 1
        last = done[np.arange(len(mean)), np.maximum(joined, 0)]
        return np.asarray(np.maximum(last[:, None] - self._other, 0.0))

    def tolerated(self, mean: np.ndarray) -> np.ndarray:
        """[K] seconds that a tolerance is a part of: a direction's [K] ``mean``; where servers are not alike, the mean
        over directions. What moves differs from what stays in how much of it is backward, so one of the directions is
        left less level, and a second of either is worth the same."""
        return mean if self._slowness is None else np.full_like(mean, mean.mean())

    def work_in(self, seconds: np.ndarray) -> np.ndarray:
        """[K, R], or [K, 1] where servers are alike: what each server computes in ``seconds`` [K, R] or [K, 1]."""
        return seconds if self._slowness is None else np.asarray(seconds / self._slowness)

    def seconds_of(self, work: np.ndarray) -> np.ndarray:
        """[K, R] seconds that each server takes for ``work`` [K, R]."""
        return work if self._slowness is None else np.asarray(work * self._slowness)


def _checked(seconds: np.ndarray, servers: int, directions: int) -> np.ndarray:
    """[R] or [K, R]; that of a single direction as [R]."""
    shapes = {1: ((servers,), (1, servers)), 2: ((2, servers),)}[directions]
    if seconds.shape not in shapes or not np.isfinite(seconds).all() or (seconds < 0).any():
        each = "" if directions == 1 else " for each direction"
        raise PlanError(f"other_seconds must be {servers} seconds of 0 or more{each}; got {seconds.tolist()}.")
    return seconds.reshape(servers) if directions == 1 else seconds


def _least_times(total: np.ndarray, other: np.ndarray, slowness: np.ndarray) -> np.ndarray:
    """[K] times with the least sum in which servers with [K, R] ``other`` work and ``slowness`` share [K] ``total``
    attention, each the same part of both directions."""
    some = np.flatnonzero(total > 0)
    least = other.max(axis=1)
    # Parts of all attention per second, by direction of those that have any.
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
    """[R] part of the attention that each server is done with in time, in both directions."""
    return np.asarray((np.maximum(times[:, None] - begin, 0.0) * speed).min(axis=0))


def _time_for(begin: np.ndarray, speed: np.ndarray, most: np.ndarray | None = None) -> float:
    """The least time at which servers that begin at [R] ``begin``, at [R] ``speed``, have done a whole 1 together; each
    does ``most`` [R] at most. Where they are never done, when the last has done its most."""
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
