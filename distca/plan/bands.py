"""Cutting a band of queries out of one document's piece and dealing it to several receivers.

A range of m query rows that ends at position d costs m rows of q (and o) and up to d rows of k,v, and brings about
m (d - m/2) query-key pairs. For a wanted number of pairs A the bytes Q m + K d are least where the range's middle lies at
sqrt(A (Q + K/2) / K): a long document gives its inner rows best, and one long range is cheaper than two short ones. So a
giver hands over one band [low, high) of a piece [start, stop), cut into consecutive ranges, one per receiver, short ranges
first (which makes the sum of their ends, and so the k,v rows, least).

Array legend: K directions, C receivers, N chosen receivers, G tried places of a band.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from distca.plan.cost import CostModel, Direction

MOST_OVERHEAD = 0.25
"""A cut that adds more than this share of the time it moves is refused; the shortest shards follow from it."""

_PLACES = np.linspace(0.0, 1.0, 13)
_ROUNDS = 2


@dataclass(frozen=True)
class Timer:
    """Seconds of query ranges in the directions that are balanced."""

    cost: CostModel
    direction: Direction

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
        distant: [C] bool, not on the giver's node.
        q_price: [C] price of moving one query row there.
        kv_price: (positions [..., N], indices [N]) -> [..., N] price of the k,v rows that a range ending there still needs.
    """

    rank: np.ndarray
    room: np.ndarray
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


def area(start: np.ndarray | float, stop: np.ndarray | float) -> np.ndarray | float:
    """Query-key pairs of the causal query ranges [start, stop)."""
    return (stop * (stop + 1.0) - start * (start + 1.0)) / 2


def fit_band(offer: Offer, receivers: Receivers, timer: Timer) -> Band | None:
    """The cheapest band that relieves the giver of what it needs and fits the receivers; None when no cut pays."""
    whole = float(area(offer.start, offer.stop))
    per_pair = offer.seconds / whole
    size = (receivers.room / per_pair[:, None]).min(axis=0)
    wanted = min(float((offer.need / per_pair).max()), whole)
    # A range costs more per pair than the whole piece: start from the rate of one that fills the preferred receiver.
    rows = np.ceil(min(size[0], wanted) / (0.5 * (offer.start + offer.stop)))
    probe = np.array([max(offer.start, int(0.5 * (offer.start + offer.stop) - rows))])
    probe_stop = np.minimum(probe + int(rows), offer.stop)
    size *= (per_pair / (timer.seconds(probe, probe_stop)[:, 0] / area(probe, probe_stop))).min()
    band = None
    for _ in range(_ROUNDS):
        chosen, sizes = _choose(size, wanted, receivers.distant)
        if not len(chosen):
            return None
        cuts = _place(offer, receivers, chosen, sizes, whole, timer.cost.block)
        band = _timed(offer, chosen, cuts, timer)
        chosen, cuts = band.chosen, band.cuts
        # Ranges of one piece differ in seconds per pair: correct sizes by the times just computed, then choose again.
        got = np.asarray(area(cuts[:-1], cuts[1:]))
        fill = (receivers.room[:, chosen] / np.maximum(band.moved, 1e-300)).min(axis=0)
        size[chosen] = got * fill * 0.999
        relief = offer.seconds - band.kept.sum(axis=1)
        wanted = min(float(got.sum() * (offer.need / np.maximum(relief, 1e-300)).max()), whole)
    return _without_misfits(offer, receivers, band, timer) if band is not None else None


def _choose(size: np.ndarray, wanted: float, distant: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[N] receivers and the pairs each gets, smallest first: the preferred ones are filled, the last is the tightest fit."""
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


def _place(
    offer: Offer, receivers: Receivers, chosen: np.ndarray, sizes: np.ndarray, whole: float, block: int
) -> np.ndarray:
    """[N + 1] cuts of the cheapest place for ranges of those sizes, on multiples of ``block`` rows from the piece's start."""
    total = np.cumsum(sizes)
    if total[-1] >= whole * (1 - 1e-12):
        low = np.array([float(offer.start)])
    else:
        highest = _end(offer.start, whole - total[-1])
        low = offer.start + (highest - offer.start) * _PLACES
    ends = np.minimum(_end(low[:, None], total), offer.stop)
    rows = np.diff(ends, axis=1, prepend=low[:, None])
    price = (rows * receivers.q_price[chosen] + receivers.kv_price(ends, chosen)).sum(axis=1)
    best = int(np.argmin(price))
    return _on_blocks(offer, np.append(low[best], ends[best]), block)


def _on_blocks(offer: Offer, cuts: np.ndarray, block: int) -> np.ndarray:
    """Round every range down to whole blocks and lengthen the first so that the band keeps its size."""
    rows = np.diff(cuts)
    rows[1:] = np.maximum(np.floor(rows[1:] / block), 1) * block
    high = offer.start + np.ceil((cuts[-1] - offer.start) / block) * block
    if high > offer.stop - block / 2:
        high = offer.stop
    inner = high - np.cumsum(rows[:0:-1])[::-1]
    bottom = inner[0] if len(inner) else high
    lost = float(area(cuts[0], cuts[-1])) - float(area(bottom, high))
    squared = (bottom + 0.5) ** 2 - 2 * lost
    low = np.sqrt(max(squared, 0.0)) - 0.5
    count = max(np.ceil((bottom - low) / block), 1) * block
    low = bottom - count
    if low < offer.start + block / 2:
        low = offer.start
    return np.maximum(np.concatenate(([low], inner, [high])), offer.start).astype(np.int64)


def _end(start: np.ndarray | float, pairs: np.ndarray | float) -> np.ndarray:
    """Position where a range that begins at ``start`` has that many query-key pairs."""
    return np.sqrt((np.asarray(start) + 0.5) ** 2 + 2 * np.asarray(pairs)) - 0.5


def _timed(offer: Offer, chosen: np.ndarray, cuts: np.ndarray, timer: Timer) -> Band:
    some = np.append(cuts[:-1] < cuts[1:], True)
    chosen, cuts = chosen[some[:-1]], cuts[some]
    edges = np.concatenate(([offer.start], cuts, [offer.stop]))
    seconds = timer.seconds(edges[:-1], edges[1:])
    return Band(chosen, cuts, seconds[:, 1:-1], seconds[:, [0, -1]])


def _without_misfits(offer: Offer, receivers: Receivers, band: Band, timer: Timer) -> Band | None:
    """Shorten ranges that exceed their room, a block at a time, and then give up those that still do or do not pay."""
    for _ in range(3):
        over = _over(receivers, band)
        if not over.any():
            break
        rows = np.maximum(np.diff(band.cuts) - over * timer.cost.block, 0)
        # The high end stays: ranges slide up into the place that a shorter neighbour leaves, the giver keeps the low end.
        cuts = band.cuts[-1] - np.append(np.cumsum(rows[::-1])[::-1], 0)
        band = _timed(offer, band.chosen, cuts, timer)
    while len(band.chosen):
        bad = _over(receivers, band) | _wasteful(offer, band, timer)
        if not bad.any():
            return band
        # A band has no holes: what lies on the shorter side of a bad range is given up with it.
        at = int(np.argmax(bad))
        kept = slice(at + 1, None) if at < len(bad) / 2 else slice(0, at)
        cuts = band.cuts[at + 1 :] if at < len(bad) / 2 else band.cuts[: at + 1]
        band = _timed(offer, band.chosen[kept], cuts, timer)
    return None


def _over(receivers: Receivers, band: Band) -> np.ndarray:
    return (band.moved > receivers.room[:, band.chosen] * (1 + 1e-9)).any(axis=0)


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
