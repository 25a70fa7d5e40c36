"""Relative speeds of attention servers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distca.plan.errors import PlanError


def check_speeds(speeds: Sequence[float] | np.ndarray | None, ranks: int) -> np.ndarray:
    """[R] float64 relative speeds; raises PlanError on a wrong number, a negative one, or none above 0."""
    if speeds is None:
        return np.ones(ranks)
    speed = np.asarray(speeds, np.float64)
    if speed.shape != (ranks,) or not np.isfinite(speed).all() or (speed < 0).any() or not speed.any():
        raise PlanError(f"speeds must be {ranks} numbers of 0 or more, at least one above 0; got {speed.tolist()}.")
    return speed
