"""Cutting a band of queries out of one document's piece and dealing it to several receivers.

A range of m query rows that ends at position d costs m rows of q (and o) and up to d rows of k,v, and brings about
m (d - m/2) query-key pairs. For a wanted number of pairs A the bytes Q m + K d are least where the range's middle lies
at sqrt(A (Q + K/2) / K): a long document gives its inner rows best, and one long range is cheaper than two short ones.
So a giver hands over one band [low, high) of a piece [start, stop), cut into consecutive ranges, one per receiver,
short ranges first (which makes the sum of their ends, and so the k,v rows, least).

Array legend: K directions, C receivers, N chosen receivers, G tried places of a band.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from distca.plan.cost import CostModel, Direction

MOST_OVERHEAD = 0.25
"""A cut that adds more than this share of the time it moves is refused; the shortest shards follow from it."""

_PLACES = np.linspace(0.0, 1.0, 13)
_NEVER_WASTEFUL = 32
"""Ranges of this many blocks always pay for their cut: checking them is skipped."""
_FINEST = 0.004
_SLIVER = 8
"""A giver keeps nothing shorter than this part of the range beside it."""


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
        most_rows: [C] query rows they may get, for their memory; infinite without a cap.
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


@dataclass(frozen=True)
class Band:
    """Consecutive ranges [cuts[i], cuts[i + 1]) of a piece.

    Attributes:
        chosen: [N] indices of receivers.
        cuts: [N + 1] int64 positions.
        moved: [K, N] seconds each receiver gains.
        kept: [K, 2] seconds the giver keeps before and behind the band.
    """

    chosen: np.ndarray
    cuts: np.ndarray
    moved: np.ndarray
    kept: np.ndarray


def area(start: np.ndarray | int, stop: np.ndarray | int) -> np.ndarray:
    """Query-key pairs of the causal query ranges [start, stop)."""
    return np.asarray((stop * (stop + 1.0) - start * (start + 1.0)) / 2)


def fit_band(offer: Offer, receivers: Receivers, timer: Timer) -> Band | None:
    """The cheapest band that relieves the giver of what it needs and fits the receivers; None when no cut pays."""
    whole = float(area(offer.start, offer.stop))
    block = timer.block(offer.seconds / (offer.stop - offer.start))
    per_pair = offer.seconds / whole
    size = (receivers.room / per_pair[:, None]).min(axis=0)
    wanted = min(float((offer.need / per_pair).max()), whole)
    # A range costs more per pair than the whole piece: start from the rate of one that fills the preferred receiver.
    rows = np.ceil(min(size[0], wanted) / (0.5 * (offer.start + offer.stop)))
    probe = np.array([max(offer.start, int(0.5 * (offer.start + offer.stop) - rows))])
    probe_stop = np.minimum(probe + int(rows), offer.stop)
    size *= (per_pair / (timer.seconds(probe, probe_stop)[:, 0] / area(probe, probe_stop))).min()
    # The lowest place of a range has fewest pairs a row: no place holds more rows for that many pairs.
    most = area(offer.start, offer.start + receivers.most_rows)
    size = np.minimum(size, most)
    chosen, sizes = _choose(size, wanted, receivers.distant)
    if not len(chosen):
        return None
    low = _place(offer, receivers, chosen, sizes, whole)
    band = _timed(offer, chosen, _on_blocks(offer, low, sizes, block), timer)
    # Ranges of one piece differ in seconds per pair: correct sizes by the times just computed, in the same place.
    got = area(band.cuts[:-1], band.cuts[1:])
    fill = (receivers.room[:, band.chosen] / np.maximum(band.moved, 1e-300)).min(axis=0)
    size[band.chosen] = np.minimum(got * fill * 0.999, most[band.chosen])
    relief = offer.seconds - band.kept.sum(axis=1)
    wanted = min(float(got.sum() * (offer.need / np.maximum(relief, 1e-300)).max()), whole)
    sizes = size[chosen]
    sizes[0] = min(sizes[0], wanted - sizes[1:].sum())
    if sizes[0] <= 0 or sizes.sum() < wanted * (1 - 1e-12):
        chosen, sizes = _choose(size, wanted, receivers.distant)
        if not len(chosen):
            return None
        low = _place(offer, receivers, chosen, sizes, whole)
    band = _timed(offer, chosen, _on_blocks(offer, low, sizes, block), timer)
    return _without_misfits(offer, receivers, band, timer, block)


def _choose(size: np.ndarray, wanted: float, distant: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[N] receivers and the pairs each gets, smallest first: the preferred ones are filled, the last is the tightest
    fit."""
    usable = np.flatnonzero(size > 0)
    total = np.cumsum(size[usable])
    full = int(np.searchsorted(total, wanted * (1 - 1e-12)))
    if full >= len(usable):
        chosen, sizes = usable, size[usable]
    else:
        rest = wanted - (total[full - 1] if full else 0.0)
        others = usable[full:]
        tight = np.where(size[others] >= rest, size[others] + distant[others] * size.max(), np.inf)
        chosen = np.append(usable[:full], others[np.argmin(tight)])
        sizes = np.append(size[usable[:full]], rest)
    order = np.argsort(sizes, kind="stable")
    return chosen[order], sizes[order]


def _place(offer: Offer, receivers: Receivers, chosen: np.ndarray, sizes: np.ndarray, whole: float) -> float:
    """Low end of the cheapest place for consecutive ranges of those sizes."""
    total = np.cumsum(sizes)
    if total[-1] >= whole * (1 - 1e-12):
        return float(offer.start)
    low = offer.start + (_end(offer.start, whole - total[-1]) - offer.start) * _PLACES
    ends = np.minimum(_end(low[:, None], total), offer.stop)
    q_price = receivers.q_price[chosen]
    price = ends @ (q_price - np.append(q_price[1:], 0.0)) - low * q_price[0]
    price += receivers.kv_price(ends, chosen).sum(axis=1)
    return float(low[price.argmin()])


def _on_blocks(offer: Offer, low: float, sizes: np.ndarray, block: int) -> np.ndarray:
    """[N + 1] cuts of ranges of those sizes from ``low`` on: every range rounded down to whole blocks counted from the
    piece's start, and the first lengthened so that the band keeps its size."""
    squared = (low + 0.5) ** 2
    edges = [low]
    for pairs in sizes.tolist():
        squared += 2 * pairs
        edges.append(min(math.sqrt(squared) - 0.5, float(offer.stop)))
    high = offer.start + math.ceil((edges[-1] - offer.start) / block) * block
    if high > offer.stop - max(block / 2, (edges[-1] - edges[-2]) / _SLIVER):
        high = offer.stop
    cuts = [high]
    for begin, end in zip(edges[-2:0:-1], edges[:1:-1], strict=True):
        cuts.append(cuts[-1] - max(int((end - begin) // block), 1) * block)
    # The first range makes up for what rounding took from the others.
    bottom = cuts[-1]
    lowest = (low + 0.5) ** 2 - (edges[-1] + 0.5) ** 2 + (high + 0.5) ** 2
    rows = bottom - (math.sqrt(max(lowest, 0.25)) - 0.5)
    cuts.append(bottom - max(math.ceil(rows / block), 1) * block)
    if cuts[-1] < offer.start + max(block / 2, rows / _SLIVER):
        cuts[-1] = offer.start
    return np.maximum(np.array(cuts[::-1], np.int64), offer.start)


def _end(start: np.ndarray | float, pairs: np.ndarray | float) -> np.ndarray:
    """Position where a range that begins at ``start`` has that many query-key pairs."""
    return np.sqrt((np.asarray(start) + 0.5) ** 2 + 2 * np.asarray(pairs)) - 0.5


def _timed(offer: Offer, chosen: np.ndarray, cuts: np.ndarray, timer: Timer) -> Band:
    some = np.append(cuts[:-1] < cuts[1:], True)
    chosen, cuts = chosen[some[:-1]], cuts[some]
    edges = np.concatenate(([offer.start], cuts, [offer.stop]))
    seconds = timer.seconds(edges[:-1], edges[1:])
    return Band(chosen, cuts, seconds[:, 1:-1], seconds[:, [0, -1]])


def _without_misfits(offer: Offer, receivers: Receivers, band: Band, timer: Timer, block: int) -> Band | None:
    """Shorten ranges that exceed their room, a block at a time, and then give up those that still do or do not pay."""
    for _ in range(3):
        over = _over(receivers, band)
        if not over.any():
            break
        rows = np.maximum(np.diff(band.cuts) - over * block, 0)
        # Ranges slide into the place that a shorter neighbour leaves, away from the side where the giver keeps rows
        # anyway.
        if band.cuts[0] == offer.start and band.cuts[-1] < offer.stop:
            cuts = band.cuts[0] + np.append(0, np.cumsum(rows))
        else:
            cuts = band.cuts[-1] - np.append(np.cumsum(rows[::-1])[::-1], 0)
        band = _timed(offer, band.chosen, cuts, timer)
    while len(band.chosen):
        bad = _over(receivers, band)
        if (np.diff(band.cuts) < _NEVER_WASTEFUL * timer.cost.block).any():
            bad |= _wasteful(offer, band, timer)
        if not bad.any():
            return band
        # A band has no holes: what lies on the shorter side of a bad range is given up with it.
        at = int(np.argmax(bad))
        kept = slice(at + 1, None) if at < len(bad) / 2 else slice(0, at)
        cuts = band.cuts[at + 1 :] if at < len(bad) / 2 else band.cuts[: at + 1]
        band = _timed(offer, band.chosen[kept], cuts, timer)
    return None


def _over(receivers: Receivers, band: Band) -> np.ndarray:
    """[N] bool: ranges that exceed their receiver's time or memory."""
    rows = band.cuts[1:] - band.cuts[:-1]
    return (rows > receivers.most_rows[band.chosen]) | (band.moved > receivers.room[:, band.chosen] * (1 + 1e-9)).any(
        axis=0
    )


def _wasteful(offer: Offer, band: Band, timer: Timer) -> np.ndarray:
    """[N] bool: ranges whose cut from the rows behind them (and, for the first, before them) costs too much."""
    start = np.append(band.cuts[:-1], offer.start)
    stop = np.concatenate((band.cuts[2:], [offer.stop, band.cuts[1]]))
    joined = timer.seconds(start, stop)
    added = band.moved - joined[:, :-1]
    added[:, :-1] += band.moved[:, 1:]
    added[:, -1] += band.kept[:, 1]
    added[:, 0] += band.kept[:, 0] + band.moved[:, 0] - joined[:, -1]
    return (added > MOST_OVERHEAD * band.moved).all(axis=0)
