"""The geometry of causal masks: which keys a query range sees, and how many query-key pairs it has.

A query range is the rows [start, stop) of one document. Where functions take ``q_rows`` and ``kv_rows``, the range is
[kv_rows - q_rows, kv_rows). The query at position p sees the keys [0, p], or with a window w the last w of these. A
*pair* is a query and a key that this query sees. Example: without a window, the range [2, 4) has 3 + 4 = 7 pairs.

There are N ranges. ``Rows`` is one number or an array; results have the shape to which the arguments broadcast.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np

Rows = TypeVar("Rows", float, np.ndarray)


def first_key(window: int | np.ndarray, start: np.ndarray) -> np.ndarray:
    """Returns [N] first key that query ranges which begin at ``start`` [N] see; ``window`` 0 means no window."""
    return np.where(np.asarray(window) > 0, np.maximum(start - window + 1, 0), 0)


def keys_seen(q_rows: np.ndarray, kv_rows: np.ndarray, window: int) -> np.ndarray:
    """Returns [N] number of keys that query ranges see with a ``window`` above 0."""
    return np.minimum(kv_rows, q_rows + window - 1)


def causal_pairs(q_rows: Rows, kv_rows: Rows) -> Rows:
    """Returns the number of pairs of query ranges without a window."""
    return q_rows * (kv_rows - 0.5 * (q_rows - 1))


def pairs(q_rows: np.ndarray, kv_rows: np.ndarray, window: int = 0) -> np.ndarray:
    """Returns [N] float64 number of pairs of query ranges; ``window`` 0 means no window.

    If q, k and v have equal head_dim, a pair takes 4 · head_dim · heads FLOPs in forward and 10 · head_dim · heads in
    backward."""
    q = np.asarray(q_rows, np.float64)
    full = causal_pairs(q, kv_rows)
    if not window:
        return full
    # With T(n) = 1 + 2 + ... + n, a window w removes T(kv - w) pairs of the queries [0, kv). The part T(kv - q - w)
    # belongs to the queries [0, kv - q), which are before the range.
    beyond = np.maximum(np.asarray(kv_rows, np.float64) - window, 0)
    in_front = np.maximum(kv_rows - q - window, 0)
    return full - 0.5 * (beyond * (beyond + 1) - in_front * (in_front + 1))


def range_pairs(start: Rows | float, stop: Rows) -> Rows:
    """Returns the number of pairs of query ranges [start, stop) without a window."""
    return (stop * (stop + 1.0) - start * (start + 1.0)) * 0.5


def squared(position: Rows) -> Rows:
    """Returns (position + 1/2)². ``squared(b) - squared(a)`` is twice the number of pairs of a range [a, b)."""
    return (position + 0.5) ** 2


def position_of(squares: Rows) -> Rows:
    """Returns the position whose :func:`squared` is ``squares``."""
    if isinstance(squares, np.ndarray):
        return np.sqrt(squares) - 0.5
    return math.sqrt(squares) - 0.5


def stop_after(start: Rows, wanted: Rows) -> Rows:
    """Returns the ends of query ranges that begin at ``start`` and have ``wanted`` pairs without a window."""
    return position_of(squared(start) + 2 * wanted)


def start_before(stop: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns [N] starts of query ranges that end at ``stop`` and have ``wanted`` pairs without a window.

    A start is 0 if the rows [0, stop) have fewer pairs."""
    return position_of(np.maximum(squared(stop) - 2 * wanted, 0.25))


def cheapest_middle(wanted: np.ndarray, q_per_kv: float) -> np.ndarray:
    """Returns [N] middle of the query range that has ``wanted`` [N] pairs and needs the fewest bytes of q, k and v.

    A range of m rows with middle c has about m·c pairs, and needs m query rows and c + m/2 keys. If a query row has Q
    bytes and a key with its value K, the fewest bytes are at c = sqrt(wanted · (Q/K + 1/2)). ``q_per_kv`` is Q/K.
    """
    return np.sqrt(wanted * (q_per_kv + 0.5))


def rows_around(middle: np.ndarray, wanted: np.ndarray, least: float) -> np.ndarray:
    """Returns [N] number of rows of ranges around ``middle`` with about ``wanted`` pairs.

    A middle below ``least`` counts as ``least``."""
    return wanted / np.maximum(middle, least)
