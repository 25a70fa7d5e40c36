"""Helpers for numpy arrays: sorting by several keys, merging, and listing the numbers of ranges.

Array legend: N elements or ranges.
"""

from __future__ import annotations

import numpy as np


def order_by(*keys: np.ndarray) -> np.ndarray:
    """Returns [N] indices that sort by the first of several [N] int64 keys, then by the second key, and so on.

    Keys must not be negative. Elements with equal keys keep their order."""
    # An element's keys and its index are joined into one number: numpy sorts such numbers several times faster than
    # np.lexsort sorts keys.
    joined, values = keys[0], int(keys[0].max(initial=0)) + 1
    for key in keys[1:]:
        width = int(key.max(initial=0)) + 1
        values *= width
        if values >= 2**63:
            return np.lexsort(keys[::-1])
        joined = joined * width + key
    bits = len(joined).bit_length()
    if values << bits >= 2**63:
        return np.argsort(joined, kind="stable")
    return np.sort(joined << bits | np.arange(len(joined))) & ((1 << bits) - 1)


def merged(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the values of two ascending arrays, ascending and without repeats. It is faster than ``np.unique``."""
    both = np.sort(np.concatenate((first, second)), kind="stable")
    return both[np.append(True, both[1:] != both[:-1])[: len(both)]]


def expand(begin: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Returns the numbers of the [N] ranges [begin, begin + count), one range after the other.

    Example: begins 5 and 0 with counts 2 and 3 give 5, 6, 0, 1, 2."""
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(begin - (ends - count), count)


def in_turns(count: int, turns: int) -> np.ndarray:
    """Returns the indices 0 to ``count`` - 1, in steps of ``turns`` from 0 on, then from 1 on, and so on.

    Example: 5 indices in 2 turns are 0, 2, 4, 1, 3."""
    return np.concatenate([np.arange(first, count, turns) for first in range(min(turns, max(count, 1)))])
