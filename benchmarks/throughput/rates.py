"""Seconds of work at clocks that a GPU holds, and at those of a burst.

In a burst, some tens of milliseconds after a pause, a GPU runs at clocks that its power limit does not let it hold: an
H200's matrix products then are up to 20 % faster than a second later.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from distca.device.clock import Clock
from distca.profile.timing import median_seconds

_BURST = 10  # repetitions
_PAUSE_S, _WARM_S, _HELD_S = 0.3, 0.4, 1.0


def held_and_burst(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Mean seconds of ``work`` over a second that follows on others like it, and median of the first ones after a
    pause. Ranks begin together, as GPUs of a machine may share what power there is."""
    clock = Clock(device)
    if not clock.on_gpu:
        work()
        seconds = median_seconds(work, clock, 2)
        return seconds, seconds
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    time.sleep(_PAUSE_S)
    dist.barrier()
    burst = median_seconds(work, clock, _BURST)
    _mean_seconds(work, clock, _WARM_S, burst)
    return _mean_seconds(work, clock, _HELD_S, burst), burst


def _mean_seconds(work: Callable[[], object], clock: Clock, total: float, each: float) -> float:
    """Mean over about ``total`` seconds of work that takes about ``each``."""
    repeats = max(round(total / each), 1)
    start = clock.now()
    for _ in range(repeats):
        work()
    return clock.seconds(start, clock.now()) / repeats
