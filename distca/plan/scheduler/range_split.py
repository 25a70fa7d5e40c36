"""Cutting consecutive query ranges out of one document's piece, one for each of several receivers.

A range of m query rows that ends at position d costs m rows of q (and o) and up to d rows of k,v, and brings about
m (d - m/2) query-key pairs. For a wanted number of pairs A the bytes Q m + K d are least where the range's middle lies
at sqrt(A (Q + K/2) / K). A long document gives its inner rows best, and one long range is cheaper than two short ones.
So a sender hands over one part [low, high) of a piece [start, stop), cut into consecutive ranges, one per receiver,
short ranges first (which makes the sum of their ends, and so the k,v rows, least).

Array legend: K directions, C receivers, N chosen receivers, G tried places of the part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from distca.plan.cost.model import CostModel, Direction

MOST_OVERHEAD = 0.25
"""A cut that adds more than this share of the time it moves is refused; the shortest shards follow from it."""

_PLACES = np.linspace(0.0, 1.0, 13)
_LEAST_BLOCKS = 8
"""Fewest blocks to hand over where whole documents do not fit the need."""
_FEW = 8
"""With more receivers sizes are corrected three times instead of once: errors add up along the ranges."""
_LONG_CONTEXT = 131_072
"""From here on, reading a document's keys once more at home is worth looking at when a place is chosen."""
_NEVER_WASTEFUL = 32
"""Ranges of this many blocks always pay for their cut: checking them is skipped."""
_SLIVER = 8
"""A sender keeps nothing shorter than this part of the range next to it."""
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


class Excess(NamedTuple):
    """A sender's piece and what should leave it.

    Attributes:
        start, stop: the piece.
        seconds: [K] what it costs as it is.
        need: [K] seconds the sender should lose; negative where it is below its limit.
    """

    start: int
    stop: int
    seconds: np.ndarray
    need: np.ndarray


class Receivers(NamedTuple):
    """Who may take ranges, in order of preference.

    Attributes:
        rank: [C].
        room: [K, C] seconds they may still gain.
        most_rows: [C] query rows they may get, for their memory; None without a cap.
        distant: [C] bool, not on the sender's node.
        q_price: [C] price of moving one query row there.
        kv_price: (positions [..., N], indices [N]) -> [..., N] price of the k,v rows that a range ending there still
        needs.
    """

    rank: np.ndarray
    room: np.ndarray
    most_rows: np.ndarray | None
    distant: np.ndarray
    q_price: np.ndarray
    kv_price: Callable[[np.ndarray, np.ndarray], np.ndarray]


class RangeSplit(NamedTuple):
    """Consecutive ranges [cuts[i], cuts[i + 1]) of a piece.

    Attributes:
        chosen: [N] indices of receivers.
        room: [K, N] seconds each may gain.
        cuts: N + 1 positions.
        moved: [K, N] seconds each receiver gains.
        kept: [K, 2] seconds the sender keeps before and behind these ranges.
        joined: [K, N + 1] seconds of each range with the rows behind it up to the next cut; last, of the first range
            with the rows before it.
    """

    chosen: np.ndarray
    room: np.ndarray
    cuts: list[int]
    moved: np.ndarray
    kept: np.ndarray
    joined: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """[N] int64 rows of every range."""
        return np.array([stop - start for start, stop in pairwise(self.cuts)])


def area(start: np.ndarray | int, stop: np.ndarray | int) -> np.ndarray:
    """Query-key pairs of the causal query ranges [start, stop)."""
    return np.asarray((stop * (stop + 1.0) - start * (start + 1.0)) * 0.5)


def least_of(directions: np.ndarray) -> np.ndarray:
    """[...] smaller of one or two directions [K, ...]; faster than a reduction over an axis of length two."""
    return np.minimum(directions[0], directions[-1])


def split_range(excess: Excess, receivers: Receivers, timer: Timer) -> RangeSplit | None:
    """The cheapest ranges that relieve the sender of its excess and fit the receivers; None when no cut pays."""
    whole = float(area(excess.start, excess.stop))
    block = timer.block(excess.seconds / (excess.stop - excess.start))
    # The lowest place of a range has fewest pairs a row: no place holds more rows for that many pairs.
    most = None if receivers.most_rows is None else area(excess.start, excess.start + receivers.most_rows)
    size, wanted, least = _first_sizes(excess, receivers, timer, whole)
    if most is not None:
        size = np.minimum(size, most)
    chosen, sizes = _choose(size, wanted, receivers.distant)
    low = _place(excess, receivers, chosen, sizes, whole, timer)
    split = _timed(excess, receivers, chosen, _on_blocks(excess, low, sizes, block), timer)
    # Ranges of one piece differ in seconds per pair: correct sizes by the times just computed, in the same place.
    for _ in range(1 if len(chosen) <= _FEW else 3):
        relief = excess.seconds - (split.kept[:, 0] + split.kept[:, 1])
        if len(split.chosen) == 1 and (relief >= excess.need).all() and not _over(receivers, split).any():
            break
        cuts = np.array(split.cuts, np.float64)
        got = area(cuts[:-1], cuts[1:])
        filled = got * least_of(split.room / np.maximum(split.moved, 1e-300)) * 0.999
        size[split.chosen] = filled if most is None else np.minimum(filled, most[split.chosen])
        wanted = min(max(float(got.sum() * (excess.need / np.maximum(relief, 1e-300)).max()), least), whole)
        sizes = size[chosen]
        sizes[0] = min(sizes[0], wanted - sizes[1:].sum())
        if sizes[0] <= 0 or sizes.sum() < wanted * (1 - 1e-12):
            chosen, sizes = _choose(size, wanted, receivers.distant)
            low = _place(excess, receivers, chosen, sizes, whole, timer)
        split = _timed(excess, receivers, chosen, _on_blocks(excess, low, sizes, block), timer)
    return _without_misfits(excess, receivers, split, timer, block)


def _first_sizes(excess: Excess, receivers: Receivers, timer: Timer, whole: float) -> tuple[np.ndarray, float, float]:
    """[C] pairs that fill each receiver, the pairs that should leave the sender, and the fewest worth a cut.

    A range costs more per pair than the whole piece, so the rate is that of a range in the piece's middle that fills
    the preferred receiver.
    """
    middle = 0.5 * (excess.start + excess.stop)
    per_pair = excess.seconds / whole
    size = least_of(receivers.room / per_pair[:, None])
    # Giving more than needed is better than giving nothing.
    least = min(_LEAST_BLOCKS * timer.cost.block * middle, float(size.max()))
    wanted = min(max(float((excess.need / per_pair).max()), least), whole)
    rows = max(1, math.ceil(min(float(size[0]), wanted) / middle))
    start = max(excess.start, int(middle - rows))
    stop = min(start + rows, excess.stop)
    seconds = timer.seconds(np.array([float(start)]), np.array([float(stop)]))[:, 0]
    rate = float((per_pair / (seconds / area(start, stop))).min())
    return size * rate, wanted, least


def _choose(size: np.ndarray, wanted: float, distant: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[N] receivers and the pairs each gets, smallest first: the preferred ones are filled, the last is the tightest
    fit."""
    total = size.cumsum()
    full = int(total.searchsorted(wanted * (1 - 1e-12)))
    if full == len(size):
        order = size.argsort(kind="stable")
        return order, size[order]
    rest = wanted - (float(total[full - 1]) if full else 0.0)
    left = size[full:]
    last = full + int(np.where(left >= rest, left + distant[full:] * size.max(), np.inf).argmin())
    if not full:
        return np.array([last]), np.array([rest])
    pairs = sorted(zip([*size[:full].tolist(), rest], [*range(full), last], strict=True), key=itemgetter(0))
    sizes, chosen = zip(*pairs, strict=True)
    return np.array(chosen), np.array(sizes)


def _place(
    excess: Excess, receivers: Receivers, chosen: np.ndarray, sizes: np.ndarray, whole: float, timer: Timer
) -> float:
    """Low end of the cheapest place for consecutive ranges of those sizes."""
    total = sizes.cumsum()
    if total[-1] >= whole * (1 - 1e-12):
        return float(excess.start)
    highest = math.sqrt((excess.start + 0.5) ** 2 + 2 * (whole - float(total[-1]))) - 0.5
    low = excess.start + (highest - excess.start) * _PLACES
    ends = np.minimum(np.sqrt(((low + 0.5) ** 2)[:, None] + 2 * total) - 0.5, excess.stop)
    q_price = receivers.q_price[chosen]
    rises = q_price.copy()
    rises[:-1] -= q_price[1:]
    price = ends @ rises - low * q_price[0]
    price += receivers.kv_price(ends, chosen).sum(axis=1)
    if excess.stop > _LONG_CONTEXT:
        # Two parts left at home read their keys twice: count that time at the price of the work that leaves.
        start, stop = np.full((2, len(low)), float(excess.start)), np.full((2, len(low)), float(excess.stop))
        start[1], stop[0] = ends[:, -1], low
        kept = (timer.seconds(start, stop) / timer.unit[:, None, None]).sum(axis=0).sum(axis=0)
        price *= 1 + (kept - kept.min()) / ((excess.seconds / timer.unit).sum() - kept.min())
    return float(low[price.argmin()])


def _on_blocks(excess: Excess, low: float, sizes: np.ndarray, block: int) -> list[int]:
    """N + 1 cuts of ranges of those sizes from ``low`` on: every range rounded down to whole blocks counted from the
    piece's start, and the first lengthened so that together they keep their size."""
    squared = (low + 0.5) ** 2
    edges = [low]
    for pairs in sizes.tolist():
        squared += 2 * pairs
        edges.append(min(math.sqrt(squared) - 0.5, float(excess.stop)))
    high = excess.start + math.ceil((edges[-1] - excess.start) / block) * block
    if high > excess.stop - max(block / 2, (edges[-1] - edges[-2]) / _SLIVER):
        high = excess.stop
    cuts = [high]
    for begin, end in zip(edges[-2:0:-1], edges[:1:-1], strict=True):
        cuts.append(cuts[-1] - max(int((end - begin) // block), 1) * block)
    # The first range makes up for what rounding took from the others.
    bottom = cuts[-1]
    lowest = (low + 0.5) ** 2 - (edges[-1] + 0.5) ** 2 + (high + 0.5) ** 2
    rows = bottom - (math.sqrt(max(lowest, 0.25)) - 0.5)
    cuts.append(bottom - max(math.ceil(rows / block), 1) * block)
    if cuts[-1] < excess.start + max(block / 2, rows / _SLIVER):
        cuts[-1] = excess.start
    return [max(cut, excess.start) for cut in reversed(cuts)]


def _timed(excess: Excess, receivers: Receivers, chosen: np.ndarray, cuts: list[int], timer: Timer) -> RangeSplit:
    some = [start < stop for start, stop in pairwise(cuts)]
    if not all(some):
        chosen, cuts = chosen[some], [cut for cut, kept in zip(cuts, [*some, True], strict=True) if kept]
    edges = [excess.start, *cuts, excess.stop]
    # In the same call: the ranges joined with the rows behind them, and the first with those before it.
    start, stop = edges[:-1] + edges[1:-2] + edges[:1], edges[1:] + edges[3:] + edges[2:3]
    seconds = timer.seconds(np.array(start, np.float64), np.array(stop, np.float64))
    count = len(edges) - 1
    return RangeSplit(
        chosen,
        receivers.room.take(chosen, axis=1),
        cuts,
        seconds[:, 1 : count - 1],
        seconds[:, 0 : count : count - 1],
        seconds[:, count:],
    )


def _without_misfits(
    excess: Excess, receivers: Receivers, split: RangeSplit, timer: Timer, block: int
) -> RangeSplit | None:
    """Shorten ranges that exceed their room, then give up those that still do or do not pay."""
    over = _over(receivers, split)
    for _ in range(3):
        if not over.any():
            break
        split = _shortened(excess, receivers, split, over, timer, block)
        over = _over(receivers, split)
    while len(split.chosen):
        bad = over
        if min(stop - start for start, stop in pairwise(split.cuts)) < _NEVER_WASTEFUL * timer.cost.block:
            bad = over | _wasteful(split)
        if not bad.any():
            return split
        # The ranges are consecutive: what lies on the shorter side of a bad one is given up with it.
        at = int(bad.argmax())
        kept = slice(at + 1, None) if at < len(bad) / 2 else slice(0, at)
        cuts = split.cuts[at + 1 :] if at < len(bad) / 2 else split.cuts[: at + 1]
        split = _timed(excess, receivers, split.chosen[kept], cuts, timer)
        over = _over(receivers, split)
    return None


def _shortened(
    excess: Excess, receivers: Receivers, split: RangeSplit, over: np.ndarray, timer: Timer, block: int
) -> RangeSplit:
    """The same with the ranges that are ``over`` cut to what fits; the others slide into the place that leaves."""
    rows = split.rows
    most = rows * least_of(split.room / np.maximum(split.moved, 1e-300)) * 0.999
    if receivers.most_rows is not None:
        most = np.minimum(most, receivers.most_rows[split.chosen])
    rows = np.where(over, (most // block * block).astype(np.int64), rows)
    # They slide away from the side where the sender keeps rows anyway.
    if split.cuts[0] == excess.start and split.cuts[-1] < excess.stop:
        cuts = list(accumulate(rows.tolist(), initial=split.cuts[0]))
    else:
        cuts = list(accumulate((-rows[::-1]).tolist(), initial=split.cuts[-1]))[::-1]
    return _timed(excess, receivers, split.chosen, cuts, timer)


def _over(receivers: Receivers, split: RangeSplit) -> np.ndarray:
    """[N] bool: ranges that exceed their receiver's time or memory."""
    over = least_of(split.room * (1 + 1e-9) - split.moved) < 0
    return over if receivers.most_rows is None else over | (split.rows > receivers.most_rows[split.chosen])


def _wasteful(split: RangeSplit) -> np.ndarray:
    """[N] bool: ranges whose cut from the rows behind them (and, for the first, before them) costs too much."""
    added = split.moved - split.joined[:, :-1]
    added[:, :-1] += split.moved[:, 1:]
    added[:, -1] += split.kept[:, 1]
    added[:, 0] += split.kept[:, 0] + split.moved[:, 0] - split.joined[:, -1]
    return (added > MOST_OVERHEAD * split.moved).all(axis=0)
