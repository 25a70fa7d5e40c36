"""Shuffles that stay the same on every machine and every numpy version."""

from __future__ import annotations

import numpy as np

from distca.errors import DataError


def shuffled(count: int, *entropy: int) -> np.ndarray:
    """A permutation of ``range(count)`` that depends on ``entropy`` alone.

    numpy promises that the raw stream of a bit generator never changes, but not that ``Generator.permutation`` keeps
    its algorithm. A run that resumes on another numpy must see the same order, so the raw stream is sorted instead.

    Args:
        count: number of items.
        entropy: non-negative integers, such as a seed and an epoch.

    Returns:
        [count] int64.

    Raises:
        DataError: on a negative seed.
    """
    if min(entropy) < 0:
        raise DataError(f"A seed is 0 or more, not {min(entropy)}; change data.seed.")
    keys = np.random.PCG64(list(entropy)).random_raw(count)
    return np.argsort(keys, kind="stable").astype(np.int64)
