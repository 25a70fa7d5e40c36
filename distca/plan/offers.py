"""What a giver offers, who may take it, and the band that was agreed on.

Array legend: K directions, C receivers, N chosen receivers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from distca.plan.cost import CostModel, Direction

_FINEST = 0.004
"""Cuts are rounded to no more than this part of a server's load."""


@dataclass(frozen=True)
class Timer:
    """Seconds of query ranges in the directions that are balanced.

    Attributes:
        cost, direction: what to count.
        unit: [K] mean load of a server.
    """

    cost: CostModel
    direction: Direction
    unit: np.ndarray

    def block(self, per_row: np.ndarray) -> int:
        """Rows to round cuts to: the kernel's tile, or less where a tile of [K] ``per_row`` seconds is a visible part
        of a server's load."""
        block = self.cost.block
        fine = _FINEST * float((self.unit / np.maximum(per_row, 1e-300)).min())
        while block > fine and block > max(1, self.cost.block // 16):
            block //= 2
        return block

    def seconds(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """[K, ...] seconds of the ranges [start, stop)."""
        return self.cost.per_direction(self.direction, stop - start, stop)


@dataclass(frozen=True)
class Offer:
    """A giver's piece and what should leave it.

    Attributes:
        start, stop: the piece.
        seconds: [K] what it costs as it is.
        need: [K] seconds the giver should lose; negative where it is below its limit.
    """

    start: int
    stop: int
    seconds: np.ndarray
    need: np.ndarray


@dataclass(frozen=True)
class Receivers:
    """Who may take ranges, in order of preference.

    Attributes:
        rank: [C].
        room: [K, C] seconds they may still gain.
        most_rows: [C] query rows they may get, for their memory; all infinite without a cap.
        distant: [C] bool, not on the giver's node.
        q_price: [C] price of moving one query row there.
        kv_price: (positions [..., N], indices [N]) -> [..., N] price of the k,v rows that a range ending there still
        needs.
    """

    rank: np.ndarray
    room: np.ndarray
    most_rows: np.ndarray
    distant: np.ndarray
    q_price: np.ndarray
    kv_price: Callable[[np.ndarray, np.ndarray], np.ndarray]

    @property
    def capped(self) -> bool:
        """Whether memory limits what they may get."""
        return bool(np.isfinite(self.most_rows[0]))


@dataclass(frozen=True)
class Band:
    """Consecutive ranges [cuts[i], cuts[i + 1]) of a piece.

    Attributes:
        chosen: [N] indices of receivers.
        cuts: [N + 1] int64 positions.
        moved: [K, N] seconds each receiver gains.
        kept: [K, 2] seconds the giver keeps before and behind the band.
        joined: [K, N + 1] seconds of each range with the rows behind it up to the next cut; last, of the first range
            with the rows before it.
    """

    chosen: np.ndarray
    cuts: np.ndarray
    moved: np.ndarray
    kept: np.ndarray
    joined: np.ndarray


def area(start: np.ndarray | int, stop: np.ndarray | int) -> np.ndarray:
    """Query-key pairs of the causal query ranges [start, stop)."""
    return np.asarray((stop * (stop + 1.0) - start * (start + 1.0)) * 0.5)


def least_of(directions: np.ndarray) -> np.ndarray:
    """[...] smaller of one or two directions [K, ...]; faster than a reduction over an axis of length two."""
    return np.minimum(directions[0], directions[-1])
