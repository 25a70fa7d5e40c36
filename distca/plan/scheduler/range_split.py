"""Cutting consecutive query ranges out of one document's piece, one for each of several receivers.

A range of m query rows that ends at position d costs m rows of q (and o) and up to d rows of k,v. Its query-key pairs
are about m (d - m/2). For A pairs the bytes Q m + K d are least where the range's middle lies at sqrt(A (Q + K/2) / K).
So a long document gives its inner rows best, and one long range is cheaper than two short ones. A sender therefore
hands over one part [low, high) of a piece [start, stop), cut into consecutive ranges, one per receiver. Short ranges
come first, which makes the sum of their ends, and so the k,v rows, least.

Example: a piece [0, 1000) should lose ranges for receivers 5 and 7. The cuts 400, 500, 700 give rows [400, 500) to one
and [500, 700) to the other; the sender keeps [0, 400) and [700, 1000).

Array legend: K directions, C receivers, N chosen receivers, G tried places of the part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress, pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from distca.plan.cost.pool import ServerWork
from distca.plan.geometry import position_of, range_pairs, squared, stop_after

MOST_OVERHEAD = 0.25
"""The most time that a cut may add, as a part of the time that it moves. Costlier cuts are refused while servers can be
relieved otherwise; so it sets how short a range may be. What follows with small budgets, and other values of all
constants here, are in benchmarks/results/planner.md."""

_PLACES = np.linspace(0.0, 1.0, 13)
"""The places that are tried for the ranges, from the start of the piece to its end. With 5 places plans move 0.1 % more
bytes, with 49 as many as with 13."""
_LEAST_BLOCKS = 8
"""The fewest kernel tiles that a sender hands over, even if it should lose less. With 32 bytes grow by 1.5 %."""
_FEW = 8
"""Receivers up to which sizes of ranges are corrected once; with more they are corrected three times, as errors add up
along the ranges. With 32 the slowest server is as fast."""
_LONG_CONTEXT = 131_072
"""The end of a piece, in rows, from which a place's price counts the keys that the sender then reads twice. Up to there
their time does not change the choice, and counting it takes longer."""
_NEVER_WASTEFUL = 32
"""The length of a range, in kernel tiles, from which it is not checked whether its cut pays: it always does."""
_SLIVER = 8
"""How many times shorter than the range next to it a sender's rest must be to go along with that range."""
_FINEST = 0.004
"""The part of a server's load that a rounded cut may be off. Where a kernel tile is more, cuts are rounded to a half, a
quarter, or at least a sixteenth of a tile."""


@dataclass(frozen=True)
class Timer:
    """Seconds of query ranges in the directions that are balanced.

    Attributes:
        work: the work of ranges on every server.
        unit: [K] mean load of a server, in seconds.
        most_overhead: most time that a cut may add, as a part of the time that it moves.
        sender: the server that gives.
        receivers: [C] the servers that may take ranges.
    """

    work: ServerWork
    unit: list[float]
    most_overhead: float = MOST_OVERHEAD
    sender: int = 0
    receivers: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def tile(self) -> int:
        """Query rows of one kernel tile."""
        return self.work.costs[0].block

    def block(self, per_row: list[float]) -> int:
        """The rows that cuts are rounded to: a kernel tile, or a part of one where a tile is too much of a load.

        ``per_row`` [K] is seconds of a row."""
        block = self.tile
        fine = _FINEST * min(unit / max(seconds, 1e-300) for unit, seconds in zip(self.unit, per_row, strict=True))
        while block > fine and block > max(1, self.tile // 16):
            block //= 2
        return block

    def seconds(self, start: Sequence[float], stop: Sequence[float]) -> list[list[float]]:
        """[K][N] seconds of a handful of ranges [start, stop) on the sender."""
        return self.work.of_few(start, stop, self.sender)

    def seconds_at(self, chosen: Sequence[int], start: Sequence[float], stop: Sequence[float]) -> list[list[float]]:
        """[K][N] seconds of ranges: the first and the last stay at the sender, the ``chosen`` receivers (indices) get
        the others."""
        if self.work.of_server is None:
            return self.seconds(start, stop)
        return self.work.of_few(start, stop, [self.sender, *self.receivers.take(chosen).tolist(), self.sender])


class Excess(NamedTuple):
    """A sender's piece and what should leave it.

    Attributes:
        start, stop: query rows of the piece.
        seconds: [K] seconds of the whole piece.
        need: [K] seconds that the sender should lose; negative where it is below its limit.
    """

    start: int
    stop: int
    seconds: list[float]
    need: list[float]


class Receivers(NamedTuple):
    """Servers that may take ranges, in order of preference.

    Attributes:
        rank: [C] the servers.
        room: [K, C] seconds that each may still gain.
        distant: [C] float64, 1 for servers on another node than the sender, else 0.
        price: (low [G], ends [G, N], indices [N]) -> [G] price of moving consecutive ranges, which begin at ``low`` and
            end at ``ends``, to these receivers: of query rows, and of the k,v rows that they still need.
    """

    rank: np.ndarray
    room: np.ndarray
    distant: np.ndarray
    price: Callable[[np.ndarray, np.ndarray, list[int]], np.ndarray]


class RangeSplit(NamedTuple):
    """Consecutive ranges [cuts[i], cuts[i + 1]) of a piece, one for each chosen receiver.

    There are mostly one or two ranges, so all fields are lists: numpy's calls would take longer than the numbers.

    Attributes:
        chosen: [N] indices of receivers.
        room: [K][N] seconds that each may gain.
        cuts: N + 1 positions.
        moved: [K][N] seconds that each receiver gains.
        kept: [K][2] seconds that the sender keeps before and behind these ranges.
    """

    chosen: list[int]
    room: list[list[float]]
    cuts: list[int]
    moved: list[list[float]]
    kept: list[list[float]]

    @property
    def rows(self) -> list[int]:
        """[N] rows of every range."""
        return [stop - start for start, stop in pairwise(self.cuts)]

    @property
    def fit(self) -> list[float]:
        """[N] room of each receiver over the time of its range, in the tighter direction."""
        directions = [
            [most / max(own, 1e-300) for most, own in zip(room, moved, strict=True)]
            for room, moved in zip(self.room, self.moved, strict=True)
        ]
        return [min(each) for each in zip(*directions, strict=True)]


def least_of(directions: np.ndarray) -> np.ndarray:
    """[...] the smaller of one or two directions [K, ...]; faster than a reduction over an axis of length two."""
    return np.minimum(directions[0], directions[-1])


def split_range(excess: Excess, receivers: Receivers, timer: Timer) -> RangeSplit | None:
    """The cheapest ranges that relieve the sender of its excess and fit the receivers; None when no cut pays."""
    # Sizes are pairs. First guess the pairs that fill each receiver, choose receivers and the place, and round to
    # blocks. Then correct the sizes by the seconds that these ranges take. At last drop ranges that do not fit or do
    # not pay.
    whole = range_pairs(float(excess.start), float(excess.stop))
    block = timer.block([seconds / (excess.stop - excess.start) for seconds in excess.seconds])
    size, wanted, least = _first_sizes(excess, receivers, timer, whole)
    chosen, sizes = _choose(size, wanted, receivers.distant)
    low = _place(excess, receivers, chosen, sizes, whole, timer)
    room = receivers.room.take(chosen, axis=1).tolist()
    split = _timed(excess, chosen, room, _on_blocks(excess, low, sizes, block), timer)
    # Ranges of one piece differ in seconds per pair: sizes are corrected by the times just computed, in the same place.
    for _ in range(1 if len(chosen) <= _FEW else 3):
        relief = [seconds - sum(kept) for seconds, kept in zip(excess.seconds, split.kept, strict=True)]
        relieved = all(own >= need for own, need in zip(relief, excess.need, strict=True))
        if relieved and len(split.chosen) == 1 and not any(_over(split)):
            break
        got = [range_pairs(float(start), float(stop)) for start, stop in pairwise(split.cuts)]
        for at, pairs, fit in zip(split.chosen, got, split.fit, strict=True):
            size[at] = pairs * fit * 0.999
        missing = max(need / max(own, 1e-300) for need, own in zip(excess.need, relief, strict=True))
        wanted = min(max(sum(got) * missing, least), whole)
        sizes = size.take(chosen).tolist()
        sizes[0] = min(sizes[0], wanted - sum(sizes[1:]))
        if sizes[0] <= 0 or sum(sizes) < wanted * (1 - 1e-12):
            chosen, sizes = _choose(size, wanted, receivers.distant)
            low = _place(excess, receivers, chosen, sizes, whole, timer)
            room = receivers.room.take(chosen, axis=1).tolist()
        split = _timed(excess, chosen, room, _on_blocks(excess, low, sizes, block), timer)
    return _without_misfits(excess, split, timer, block)


def _first_sizes(excess: Excess, receivers: Receivers, timer: Timer, whole: float) -> tuple[np.ndarray, float, float]:
    """[C] pairs that fill each receiver, the pairs that should leave the sender, and the fewest that are worth a cut.

    Seconds become pairs by the rate of a range in the piece's middle that fills the preferred receiver: a range costs
    more per pair than the whole piece.
    """
    middle = 0.5 * (excess.start + excess.stop)
    per_pair = [seconds / whole for seconds in excess.seconds]
    size = np.minimum(receivers.room[0] / per_pair[0], receivers.room[-1] / per_pair[-1])
    # A few blocks are handed over even if fewer are needed: more than needed is better than nothing.
    least = min(_LEAST_BLOCKS * timer.tile * middle, float(size.max()))
    wanted = min(max(*(need / each for need, each in zip(excess.need, per_pair, strict=True)), least), whole)
    rows = max(1, math.ceil(min(float(size[0]), wanted) / middle))
    start = max(excess.start, int(middle - rows))
    stop = min(start + rows, excess.stop)
    pairs = range_pairs(float(start), float(stop))
    seconds = timer.seconds([start], [stop])
    size *= min(each / (own / pairs) for each, (own,) in zip(per_pair, seconds, strict=True))
    return size, wanted, least


def _choose(size: np.ndarray, wanted: float, distant: np.ndarray) -> tuple[list[int], list[float]]:
    """[N] receivers and the pairs that each gets, smallest first.

    Receivers are filled in order of preference; what is left goes to the one that it fills best, if possible on the
    sender's node. Example: sizes 50, 40, 30 and 12 for 60 pairs fill the first with 50 and give 10 to the last."""
    total = size.cumsum()
    full = int(total.searchsorted(wanted * (1 - 1e-12)))
    if full == len(size):
        order = size.argsort(kind="stable")
        return order.tolist(), size[order].tolist()
    rest = wanted - (float(total[full - 1]) if full else 0.0)
    left = size[full:]
    last = full + int(np.where(left >= rest, left + distant[full:] * total[-1], np.inf).argmin())
    pairs = sorted(zip([*size[:full].tolist(), rest], [*range(full), last], strict=True), key=itemgetter(0))
    return [at for _, at in pairs], [own for own, _ in pairs]


def _place(
    excess: Excess, receivers: Receivers, chosen: list[int], sizes: list[float], whole: float, timer: Timer
) -> float:
    """The first row of the cheapest place for consecutive ranges of these sizes, of ``_PLACES`` from start to end."""
    total = list(accumulate(sizes))
    if total[-1] >= whole * (1 - 1e-12):
        return float(excess.start)
    highest = stop_after(float(excess.start), whole - total[-1])
    low = excess.start + (highest - excess.start) * _PLACES
    ends = np.minimum(stop_after(low[:, None], np.array(total)), excess.stop)
    price = receivers.price(low, ends, chosen)
    if excess.stop > _LONG_CONTEXT:
        # Two parts left at home read their keys twice. The price of a place grows by that time, over that of the work
        # that leaves.
        rows = np.concatenate((low - excess.start, excess.stop - ends[:, -1]))
        seconds = timer.work.on(timer.sender, rows, np.append(low, np.full(len(low), float(excess.stop))))
        kept = (seconds / np.array(timer.unit)[:, None]).sum(axis=0).reshape(2, -1).sum(axis=0)
        least = kept.min()
        whole_piece = sum(own / unit for own, unit in zip(excess.seconds, timer.unit, strict=True))
        price *= 1 + (kept - least) / (whole_piece - least)
    return float(low[price.argmin()])


def _on_blocks(excess: Excess, low: float, sizes: list[float], block: int) -> list[int]:
    """N + 1 cuts of ranges of these sizes from ``low`` on, rounded to whole blocks counted from the piece's start.

    The end is rounded up. Then every range but the first is rounded down, and the first is lengthened so that together
    they have as many pairs as they should. What would leave the sender a sliver takes the sliver too."""
    # "edges" are the exact borders. squared() grows by twice the pairs, so borders follow from added pairs.
    square = squared(low)
    edges = [low]
    for pairs in sizes:
        square += 2 * pairs
        edges.append(min(position_of(square), float(excess.stop)))
    high = excess.start + math.ceil((edges[-1] - excess.start) / block) * block
    if high > excess.stop - max(block / 2, (edges[-1] - edges[-2]) / _SLIVER):
        high = excess.stop
    cuts = [high]
    for begin, end in zip(edges[-2:0:-1], edges[:1:-1], strict=True):
        cuts.append(cuts[-1] - max(int((end - begin) // block), 1) * block)
    # The first range begins where all ranges together, up to the rounded end, have the pairs that they should.
    bottom = cuts[-1]
    lowest = squared(low) - squared(edges[-1]) + squared(float(high))
    rows = bottom - position_of(max(lowest, 0.25))
    cuts.append(bottom - max(math.ceil(rows / block), 1) * block)
    if cuts[-1] < excess.start + max(block / 2, rows / _SLIVER):
        cuts[-1] = excess.start
    return [max(cut, excess.start) for cut in reversed(cuts)]


def _timed(excess: Excess, chosen: list[int], room: list[list[float]], cuts: list[int], timer: Timer) -> RangeSplit:
    """The split at ``cuts`` with its seconds; receivers whose range has no rows are left out."""
    some = [start < stop for start, stop in pairwise(cuts)]
    if not all(some):
        chosen, cuts = list(compress(chosen, some)), list(compress(cuts, [*some, True]))
        room = [list(compress(each, some)) for each in room]
    seconds = timer.seconds_at(chosen, [excess.start, *cuts], [*cuts, excess.stop])
    return RangeSplit(chosen, room, cuts, [each[1:-1] for each in seconds], [[each[0], each[-1]] for each in seconds])


def _without_misfits(excess: Excess, split: RangeSplit, timer: Timer, block: int) -> RangeSplit | None:
    """Shortens ranges that exceed their room, then gives up those that still do or do not pay; None where none is
    left."""
    over = _over(split)
    for _ in range(3):
        if not any(over):
            break
        split = _shortened(excess, split, over, timer, block)
        over = _over(split)
    while split.chosen:
        bad = over
        if min(split.rows) < _NEVER_WASTEFUL * timer.tile:
            bad = [each or wasted for each, wasted in zip(over, _wasteful(excess, split, timer), strict=True)]
        if not any(bad):
            return split
        # Ranges must stay consecutive, so those on the shorter side of a bad one are given up with it.
        at = bad.index(True)
        kept = slice(at + 1, None) if at < len(bad) / 2 else slice(0, at)
        cuts = split.cuts[at + 1 :] if at < len(bad) / 2 else split.cuts[: at + 1]
        split = _timed(excess, split.chosen[kept], [each[kept] for each in split.room], cuts, timer)
        over = _over(split)
    return None


def _shortened(excess: Excess, split: RangeSplit, over: list[bool], timer: Timer, block: int) -> RangeSplit:
    """The split with the ranges that are ``over`` cut to what fits; the others slide into the gap."""
    rows = split.rows
    for at, fit in enumerate(split.fit):
        if over[at]:
            rows[at] = int(rows[at] * fit * 0.999 // block) * block
    # They slide to the end of the piece that moves as a whole, so that the sender keeps one part and not two.
    if split.cuts[0] == excess.start and split.cuts[-1] < excess.stop:
        cuts = list(accumulate(rows, initial=split.cuts[0]))
    else:
        cuts = list(accumulate((-own for own in reversed(rows)), initial=split.cuts[-1]))[::-1]
    return _timed(excess, split.chosen, split.room, cuts, timer)


def _over(split: RangeSplit) -> list[bool]:
    """[N] whether each range takes longer than its receiver has room for."""
    over = [False] * len(split.chosen)
    for room, moved in zip(split.room, split.moved, strict=True):
        over = [was or own > most * (1 + 1e-9) for was, own, most in zip(over, moved, room, strict=True)]
    return over


def _wasteful(excess: Excess, split: RangeSplit, timer: Timer) -> list[bool]:
    """[N] whether the cut of each range from the rows behind it (and, for the first, before it) costs too much.

    A cut costs the seconds of both sides, less the seconds of one range that joins them."""
    wasteful, cuts, most = [True] * len(split.chosen), split.cuts, timer.most_overhead
    # Seconds of each range joined with the one behind it; at last, of the first joined with what is before it.
    seconds = timer.seconds([*cuts[:-1], excess.start], [*cuts[2:], excess.stop, cuts[1]])
    alone = split.moved if timer.work.of_server is None else timer.seconds(cuts[:-1], cuts[1:])
    for moved, (before, behind), joined in zip(alone, split.kept, seconds, strict=True):
        others = [*moved[1:], behind]
        added = [own - both + other for own, both, other in zip(moved, joined[:-1], others, strict=True)]
        added[0] += before + moved[0] - joined[-1]
        wasteful = [was and more > most * own for was, more, own in zip(wasteful, added, moved, strict=True)]
    return wasteful
