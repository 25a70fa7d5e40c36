"""Which range of which document a loaded server should hand to which other server: candidates, their price and the best.

A piece [a, b) can be handed over whole, or as a range at its head, at its tail, or inside it. A range of m rows that ends
at row d costs m rows of q (and o) and up to d rows of k,v, and brings about m x (d - m/2) query-key pairs. For a wanted
number of pairs A the bytes Q m + K d are least where the middle of the range is sqrt(A (Q + K/2) / K): long documents give
their inner rows best, and one long range is cheaper than two short ones.

Array legend: K directions, C receivers, P pieces, N = 3 C P candidates in the order [placement, receiver, piece].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.plan.cost import CostModel, Direction, pairs

MOST_OVERHEAD = 0.25
"""A cut is refused when it adds more than this share of the moved work's time; shortest shards follow from it."""

_HEAD, _TAIL, _INNER = range(3)


@dataclass(frozen=True)
class Pieces:
    """Query ranges that one server computes. Arrays: document, start, stop [P] int64; seconds [K, P] float64."""

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    seconds: np.ndarray

    def take(self, chosen: np.ndarray) -> Pieces:
        return Pieces(self.document[chosen], self.start[chosen], self.stop[chosen], self.seconds[:, chosen])


@dataclass(frozen=True)
class Ranges:
    """Candidate ranges.

    Attributes:
        start, stop: [3, C, P] the range.
        parts: [K, 3, 3, C, P] seconds of the range, of what the giver keeps before it and of what it keeps behind it.
        relief: [K, 3, C, P] seconds the giver loses: less than the range costs, by what the cut adds to the kept parts.
    """

    start: np.ndarray
    stop: np.ndarray
    parts: np.ndarray
    relief: np.ndarray

    @property
    def moved(self) -> np.ndarray:
        """[K, 3, C, P] seconds the receiver gains."""
        return self.parts[:, 0]


@dataclass(frozen=True)
class Sizer:
    """Cuts ranges of a wanted size out of pieces.

    Attributes:
        cost, direction: what time to count.
        middle: (Q + K/2) / K, from the bytes of a q row and a k,v row.
    """

    cost: CostModel
    direction: Direction
    middle: float

    def ranges(self, pieces: Pieces, need: np.ndarray, room: np.ndarray) -> Ranges:
        """Ranges that relieve a giver of ``need`` [K] seconds (at most) and fit into ``room`` [K, C]."""
        area = pairs(pieces.stop - pieces.start, pieces.stop)
        per_pair = pieces.seconds / area
        wanted = (need[:, None] / per_pair).max(axis=0)[None]
        fitting = (room[:, :, None] / per_pair[:, None]).min(axis=0)
        round_up = np.broadcast_to(wanted <= fitting, (3, *fitting.shape))
        target = np.broadcast_to(np.minimum(np.minimum(wanted, fitting), area), (3, *fitting.shape))
        found = self._cut(pieces, target, area, round_up)
        # The rate of a part differs from its piece's: correct the size once by the times just computed.
        want_scale = _ratio(need[:, None, None, None], found.relief).max(axis=0)
        fit_scale = _ratio(room[:, None, :, None], found.moved).min(axis=0)
        got = pairs(found.stop - found.start, found.stop)
        target = np.minimum(got * np.minimum(want_scale * 1.001, fit_scale * 0.999), area)
        return self._cut(pieces, target, area, want_scale <= fit_scale)

    def _cut(self, pieces: Pieces, target: np.ndarray, area: np.ndarray, round_up: np.ndarray) -> Ranges:
        a, b = pieces.start, pieces.stop
        block = self.cost.block
        middle = np.sqrt(self.middle * target[_INNER])
        rows = np.stack(
            (
                np.sqrt((a * (a + 1.0)) + 2 * target[_HEAD]) - a,
                b - np.sqrt(np.maximum(b * (b + 1.0) - 2 * target[_TAIL], 0.0)),
                target[_INNER] / np.maximum(middle, 1.0),
            )
        )
        whole = target >= area * (1 - 1e-12)
        blocks = np.where(round_up, np.ceil(rows / block), np.floor(rows / block))
        count = np.where(whole, b - a, np.minimum(blocks * block, b - a)).astype(np.int64)
        inner = np.floor((middle - count[_INNER] / 2 - a) / block) * block
        inner = np.clip(inner, 0, b - a - count[_INNER]).astype(np.int64)
        start = np.stack((np.broadcast_to(a, inner.shape), b - count[_TAIL], a + inner))
        stop = start + count
        return Ranges(start, stop, *self._seconds(pieces, start, stop))

    def _seconds(self, pieces: Pieces, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        a, b = pieces.start, pieces.stop
        rows = np.stack((stop - start, start - a, b - stop))
        context = np.stack((stop, start, np.broadcast_to(b, stop.shape)))
        seconds = self.cost.per_direction(self.direction, rows, context)
        return seconds, pieces.seconds[:, None, None] - seconds[:, 1] - seconds[:, 2]


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return numerator / np.maximum(denominator, 1e-300)


def worth(ranges: Ranges, need: np.ndarray, room: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """[3, C, P] useful time of every candidate in units of the mean load; 0 for one that does not fit or costs too much.

    Args:
        ranges: the candidates.
        need: [K] seconds the giver is above its limit (negative where it is below).
        room: [K, C] seconds the receivers are below theirs.
        scale: [K] mean load.
    """
    fits = (ranges.moved <= room[:, None, :, None] * (1 + 1e-9)).all(axis=0) & (ranges.stop > ranges.start)
    units = scale[:, None, None, None]
    moved = (ranges.moved / units).sum(axis=0)
    added = moved - (ranges.relief / units).sum(axis=0)
    useful = (np.minimum(ranges.relief, np.maximum(need, 0.0)[:, None, None, None]) / units).sum(axis=0)
    return np.where(fits & (added <= MOST_OVERHEAD * moved), np.maximum(useful, 0.0), 0.0)
