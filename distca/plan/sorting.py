"""Helpers of the planner for numpy arrays: sorting by several keys, merging, and writing ranges as numbers."""

from __future__ import annotations

import numpy as np


def order_by(*keys: np.ndarray) -> np.ndarray:
    """Returns [N] indices that sort by the first of several [N] int64 keys, among equals by the second, and so on.

    Keys must be 0 or more. Elements whose keys are all equal keep their order. The keys and the index of each element
    are joined into one number, because numpy sorts numbers several times faster than ``np.lexsort`` sorts keys. If the
    joined number does not fit into 63 bits, ``np.lexsort`` or ``np.argsort`` is used."""
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
    """Returns the values of two ascending arrays, ascending, each value once. This is faster than ``np.unique``."""
    both = np.sort(np.concatenate((first, second)), kind="stable")
    return both[np.append(True, both[1:] != both[:-1])[: len(both)]]


def expand(begin: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Returns all numbers of the ranges [begin, begin + count), one range after the other.

    Example: begins 5 and 0 with counts 2 and 3 give 5, 6, 0, 1, 2."""
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(begin - (ends - count), count)


def in_turns(count: int, turns: int) -> np.ndarray:
    """Returns the indices 0 to ``count`` - 1 in another order: every ``turns``-th index from 0 on, then every
    ``turns``-th from 1 on, and so on.

    If elements are sorted by size, each of ``turns`` consecutive parts then has elements of all sizes. Example: 5
    elements in 2 turns are ordered as 0, 2, 4, 1, 3."""
    return np.concatenate([np.arange(first, count, turns) for first in range(min(turns, max(count, 1)))])
