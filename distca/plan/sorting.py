"""Helpers for numpy arrays: sorting by several keys, merging, and making lists of indices."""

from __future__ import annotations

import numpy as np


def order_by(*keys: np.ndarray) -> np.ndarray:
    """Returns [N] int64 indices that sort N elements by the first key, then by the second key, and so on.

    Each key is [N] int64 without negative numbers. Elements with equal keys keep their order."""
    # An element's keys, and its index if 63 bits suffice, become one number: np.lexsort is several times slower.
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
    """Returns the values of two ascending arrays, in ascending order and without repetition."""
    both = np.sort(np.concatenate((first, second)), kind="stable")
    return both[np.append(True, both[1:] != both[:-1])[: len(both)]]


def expand(begin: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Returns the integers of N ranges, one range after the other; range i is [begin[i], begin[i] + count[i]).

    Example: begin [5, 0] and count [2, 3] give [5, 6, 0, 1, 2]."""
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(begin - (ends - count), count)


def in_turns(count: int, turns: int) -> np.ndarray:
    """Returns the indices 0 to ``count`` - 1: those with remainder 0 modulo ``turns``, then those with 1, and so on.

    Example: 5 indices in 2 turns are 0, 2, 4, 1, 3."""
    return np.concatenate([np.arange(first, count, turns) for first in range(min(turns, max(count, 1)))])
