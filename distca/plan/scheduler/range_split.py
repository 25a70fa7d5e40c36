"""Cuts ranges out of a *piece*: query rows of one document, whose causal attention one rank (the *sender*) computes.

``balancer.py`` calls :func:`split_range`. *Receivers* are ranks that have time for some of these rows. The sender gives
them one *part* of the piece, cut into consecutive ranges. Example: the piece [0, 1000) gets the cuts 400, 500 and 700.
One receiver gets the rows [400, 500) and another [500, 700). The sender keeps [0, 400) and [700, 1000).

Array legend: K directions (1 for forward or backward, 2 for both), C receivers, N chosen receivers, G places that are
tried for the part. [K][N] is a list of K lists. ``benchmarks/planner_constants.py`` compared the constants with other
values (benchmarks/results/planner.md).
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
"""The most seconds that a cut may usually add, divided by the seconds of the range that moves. A cut adds time because
the ranges on both sides of it read the same keys."""

_PLACES = np.linspace(0.0, 1.0, 13)
"""The places that are tried for the part: at 0 it begins with the piece, at 1 it ends with the piece. Early rows attend
to few keys, so for the same seconds more query rows must travel. Late rows need more keys and values."""
_LEAST_BLOCKS = 8
"""A sender should give up at least the pairs of this many kernel tiles of query rows in the piece's middle. If no
receiver has room for them, fewer are enough. With 32 instead, plans move 1.5 % more bytes."""
_FEW = 8
"""For up to this many receivers, the guessed sizes of ranges are corrected once; for more, up to three times. With 2
instead, the slowest rank takes 0.16 % longer."""
_LONG_CONTEXT = 131_072
"""If a piece ends behind this row of its document, the price of a place also counts the sender's time (:func:`_place`).
For other pieces this time hardly changes plans, and without it planning is faster."""
_NEVER_WASTEFUL = 32
"""If every range has at least this many kernel tiles of query rows, the time that cuts add is not checked."""
_SLIVER = 8
"""The piece's rows before the part join the part's first range if they are fewer than 1/8 of that range's rows. Rows
behind the part join the last range likewise."""
_FINEST = 0.004
"""Ranges are cut to whole kernel tiles of query rows, if a tile takes at most this fraction of a rank's mean seconds.
Otherwise they are cut to multiples of a half, a quarter, an eighth or a sixteenth of a tile."""


@dataclass(frozen=True)
class Timer:
    """Gives the seconds of query ranges, in the directions that are balanced.

    Attributes:
        work: gives the seconds of a range on every rank.
        unit: [K] seconds that ranks compute on average.
        receivers: [C] the ranks that may take ranges.
    """

    work: ServerWork
    unit: list[float]
    most_overhead: float = MOST_OVERHEAD
    sender: int = 0
    receivers: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def tile(self) -> int:
        return self.work.costs[0].block

    def block(self, per_row: list[float]) -> int:
        """Returns a number of rows; ranges are cut to multiples of it (``_FINEST``).

        ``per_row`` [K] has the seconds of a query row."""
        block = self.tile
        fine = _FINEST * min(unit / max(seconds, 1e-300) for unit, seconds in zip(self.unit, per_row, strict=True))
        while block > fine and block > max(1, self.tile // 16):
            block //= 2
        return block

    def seconds(self, start: Sequence[float], stop: Sequence[float]) -> list[list[float]]:
        """Returns [K][N] seconds of the ranges [start, stop) on the sender."""
        return self.work.of_few(start, stop, self.sender)

    def seconds_at(self, chosen: Sequence[int], start: Sequence[float], stop: Sequence[float]) -> list[list[float]]:
        """Returns [K][N + 2] seconds of the ranges [start, stop).

        The first and the last range are on the sender. Range i between them is on receiver ``chosen[i - 1]``."""
        if self.work.of_server is None:
            return self.seconds(start, stop)
        return self.work.of_few(start, stop, [self.sender, *self.receivers.take(chosen).tolist(), self.sender])


class Excess(NamedTuple):
    """A piece, and the time that the sender should save.

    Attributes:
        start, stop: the first query row, and one past the last.
        seconds: [K] seconds of the whole piece.
        need: [K] seconds that the sender should save; negative in a direction where it has time left.
    """

    start: int
    stop: int
    seconds: list[float]
    need: list[float]


class Receivers(NamedTuple):
    """The ranks that may take ranges, [C] in order of preference.

    Attributes:
        room: [K, C] seconds that each receiver may still gain.
        distant: [C] float64, 1 for receivers on another node than the sender's, else 0.
        price: returns [G] the bytes that travel with the part at each place; bytes between nodes count more. Its
            arguments are the part's first row [G], the ends of all ranges [G, N], and their receivers' indices [N].
    """

    rank: np.ndarray
    room: np.ndarray
    distant: np.ndarray
    price: Callable[[np.ndarray, np.ndarray, list[int]], np.ndarray]


class RangeSplit(NamedTuple):
    """Consecutive ranges [cuts[i], cuts[i + 1]) of a piece, one for each chosen receiver.

    Attributes:
        chosen: [N] indices of receivers.
        room: [K][N] seconds that each receiver may gain.
        moved: [K][N] seconds that each receiver gains.
        kept: [K][2] seconds of the sender's rows before and behind the ranges.
    """

    chosen: list[int]
    room: list[list[float]]
    cuts: list[int]
    moved: list[list[float]]
    kept: list[list[float]]

    @property
    def rows(self) -> list[int]:
        return [stop - start for start, stop in pairwise(self.cuts)]

    @property
    def fit(self) -> list[float]:
        """Returns [N] each receiver's room divided by its range's seconds, in the direction where this is smaller."""
        directions = [
            [most / max(own, 1e-300) for most, own in zip(room, moved, strict=True)]
            for room, moved in zip(self.room, self.moved, strict=True)
        ]
        return [min(each) for each in zip(*directions, strict=True)]


def least_of(directions: np.ndarray) -> np.ndarray:
    """Returns the minimum over directions: an array [K, ...] becomes [...]."""
    return np.minimum(directions[0], directions[-1])


def split_range(excess: Excess, receivers: Receivers, timer: Timer) -> RangeSplit | None:
    """Returns ranges for receivers, at the place with the lowest price.

    The ranges save the sender about ``excess.need`` seconds, or less if receivers have too little room. Ranges that
    exceed their receiver's room are shortened. A range is dropped if it still exceeds the room, or if its cut adds more
    time than ``timer.most_overhead`` allows. The result is None if no range is left."""
    # The size of a range is its number of query-key pairs; ``wanted`` pairs should leave the sender. Sizes are guessed,
    # and corrected in the loop.
    whole = range_pairs(float(excess.start), float(excess.stop))
    block = timer.block([seconds / (excess.stop - excess.start) for seconds in excess.seconds])
    size, wanted, least = _first_sizes(excess, receivers, timer, whole)
    chosen, sizes = _choose(size, wanted, receivers.distant)
    low = _place(excess, receivers, chosen, sizes, whole, timer)
    room = receivers.room.take(chosen, axis=1).tolist()
    split = _timed(excess, chosen, room, _on_blocks(excess, low, sizes, block), timer)
    for _ in range(1 if len(chosen) <= _FEW else 3):
        relief = [seconds - sum(kept) for seconds, kept in zip(excess.seconds, split.kept, strict=True)]
        relieved = all(own >= need for own, need in zip(relief, excess.need, strict=True))
        if relieved and len(split.chosen) == 1 and not any(_over(split)):
            break
        got = [range_pairs(float(start), float(stop)) for start, stop in pairwise(split.cuts)]
        for at, pairs, fit in zip(split.chosen, got, split.fit, strict=True):
            size[at] = pairs * fit * 0.999  # with a margin, so that few ranges exceed their receiver's room
        missing = max(need / max(own, 1e-300) for need, own in zip(excess.need, relief, strict=True))
        wanted = min(max(sum(got) * missing, least), whole)
        # The first range gives up what all ranges together have above ``wanted``. If the first range is then empty, or
        # all ranges together have less than ``wanted``, receivers are chosen again.
        sizes = size.take(chosen).tolist()
        sizes[0] = min(sizes[0], wanted - sum(sizes[1:]))
        if sizes[0] <= 0 or sum(sizes) < wanted * (1 - 1e-12):
            chosen, sizes = _choose(size, wanted, receivers.distant)
            low = _place(excess, receivers, chosen, sizes, whole, timer)
            room = receivers.room.take(chosen, axis=1).tolist()
        split = _timed(excess, chosen, room, _on_blocks(excess, low, sizes, block), timer)
    return _without_misfits(excess, split, timer, block)


def _first_sizes(excess: Excess, receivers: Receivers, timer: Timer, whole: float) -> tuple[np.ndarray, float, float]:
    """Returns numbers of pairs: [C] those that each receiver has room for, those that should leave the sender, and the
    fewest that may leave. The [C] numbers are guessed from the seconds of a short range in the middle of the piece."""
    middle = 0.5 * (excess.start + excess.stop)
    per_pair = [seconds / whole for seconds in excess.seconds]
    size = np.minimum(receivers.room[0] / per_pair[0], receivers.room[-1] / per_pair[-1])
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
    """Returns [N] chosen receivers and the pairs that each gets, fewest pairs first.

    Each receiver reads all keys up to the end of its range. Small ranges come first in the part, because then the
    numbers of keys that receivers read have the smallest sum.

    In order of preference, receivers get as many pairs as they have room for. The last pairs go to the receiver with
    the least room that suffices, on the sender's node if possible. Example: 60 pairs should go, and receivers have room
    for 50, 40, 30 and 12. Then the first receiver gets 50 pairs, and the fourth 10."""
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
    """Returns the first row of the part at the cheapest of ``_PLACES``."""
    total = list(accumulate(sizes))
    if total[-1] >= whole * (1 - 1e-12):
        return float(excess.start)
    highest = stop_after(float(excess.start), whole - total[-1])
    low = excess.start + (highest - excess.start) * _PLACES
    ends = np.minimum(stop_after(low[:, None], np.array(total)), excess.stop)
    price = receivers.price(low, ends, chosen)
    if excess.stop > _LONG_CONTEXT:
        # A sender that keeps rows both before and behind the part reads some keys twice. The price rises by the time
        # that this adds, as a fraction of the most time that the sender can save.
        rows = np.concatenate((low - excess.start, excess.stop - ends[:, -1]))
        seconds = timer.work.on(timer.sender, rows, np.append(low, np.full(len(low), float(excess.stop))))
        kept = (seconds / np.array(timer.unit)[:, None]).sum(axis=0).reshape(2, -1).sum(axis=0)
        least = kept.min()
        whole_piece = sum(own / unit for own, unit in zip(excess.seconds, timer.unit, strict=True))
        price *= 1 + (kept - least) / (whole_piece - least)
    return float(low[price.argmin()])


def _on_blocks(excess: Excess, low: float, sizes: list[float], block: int) -> list[int]:
    """Returns [N + 1] cuts for ranges of about ``sizes`` pairs from about row ``low`` on.

    Ranges have multiples of ``block`` rows, except at the piece's begin and end. The part's end is rounded up. The rows
    of all ranges but the first are rounded down, and the first gets the pairs that remain. If fewer than half a block
    of the piece's rows, or few by ``_SLIVER``, are before or behind the part, they join the part."""
    # "edges" are the exact cuts. Between two of them, squared() grows by twice the pairs of the range.
    square = squared(low)
    edges = [low]
    for pairs in sizes:
        square += 2 * pairs
        edges.append(min(position_of(square), float(excess.stop)))
    high = excess.start + math.ceil((edges[-1] - excess.start) / block) * block
    if high > excess.stop - max(block / 2, (edges[-1] - edges[-2]) / _SLIVER):
        high = excess.stop
    cuts = [high]  # the last cut first
    for begin, end in zip(edges[-2:0:-1], edges[:1:-1], strict=True):
        cuts.append(cuts[-1] - max(int((end - begin) // block), 1) * block)
    # The first range begins where the whole part has as many pairs as ``sizes`` together.
    bottom = cuts[-1]
    lowest = squared(low) - squared(edges[-1]) + squared(float(high))
    rows = bottom - position_of(max(lowest, squared(0.0)))
    cuts.append(bottom - max(math.ceil(rows / block), 1) * block)
    if cuts[-1] < excess.start + max(block / 2, rows / _SLIVER):
        cuts[-1] = excess.start
    return [max(cut, excess.start) for cut in reversed(cuts)]


def _timed(excess: Excess, chosen: list[int], room: list[list[float]], cuts: list[int], timer: Timer) -> RangeSplit:
    """Returns the split at ``cuts``, without receivers whose range is empty."""
    some = [start < stop for start, stop in pairwise(cuts)]
    if not all(some):
        chosen, cuts = list(compress(chosen, some)), list(compress(cuts, [*some, True]))
        room = [list(compress(each, some)) for each in room]
    seconds = timer.seconds_at(chosen, [excess.start, *cuts], [*cuts, excess.stop])
    return RangeSplit(chosen, room, cuts, [each[1:-1] for each in seconds], [[each[0], each[-1]] for each in seconds])


def _without_misfits(excess: Excess, split: RangeSplit, timer: Timer, block: int) -> RangeSplit | None:
    """Returns the split without bad ranges; None if no range is left.

    A range is bad if its cut adds too much time, or if it exceeds its receiver's room after three shortenings."""
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
        # Ranges must stay consecutive. So either the ranges before a bad range or those behind it are dropped too.
        at = bad.index(True)
        kept = slice(at + 1, None) if at < len(bad) / 2 else slice(0, at)
        cuts = split.cuts[at + 1 :] if at < len(bad) / 2 else split.cuts[: at + 1]
        split = _timed(excess, split.chosen[kept], [each[kept] for each in split.room], cuts, timer)
        over = _over(split)
    return None


def _shortened(excess: Excess, split: RangeSplit, over: list[bool], timer: Timer, block: int) -> RangeSplit:
    """Returns the split with shorter ranges where ``over`` is True, and without gaps between ranges."""
    rows = split.rows
    for at, fit in enumerate(split.fit):
        if over[at]:
            rows[at] = int(rows[at] * fit * 0.999 // block) * block
    # A part at one end of the piece stays at that end, so that the sender keeps one range and not two.
    if split.cuts[0] == excess.start and split.cuts[-1] < excess.stop:
        cuts = list(accumulate(rows, initial=split.cuts[0]))
    else:
        cuts = list(accumulate((-own for own in reversed(rows)), initial=split.cuts[-1]))[::-1]
    return _timed(excess, split.chosen, split.room, cuts, timer)


def _over(split: RangeSplit) -> list[bool]:
    over = [False] * len(split.chosen)
    for room, moved in zip(split.room, split.moved, strict=True):
        over = [was or own > most * (1 + 1e-9) for was, own, most in zip(over, moved, room, strict=True)]
    return over


def _wasteful(excess: Excess, split: RangeSplit, timer: Timer) -> list[bool]:
    """Returns [N] whether the cut behind each range adds too much time in every direction (``most_overhead``).

    A cut adds the seconds of its two sides, minus the seconds of both sides as one range. For the first range, the cut
    before it counts too."""
    wasteful, cuts, most = [True] * len(split.chosen), split.cuts, timer.most_overhead
    # All seconds are the sender's. "seconds" [K][N + 1]: both sides of the cut behind each range as one range; the last
    # entry is both sides of the cut before the first range. "alone" [K][N]: each range by itself.
    seconds = timer.seconds([*cuts[:-1], excess.start], [*cuts[2:], excess.stop, cuts[1]])
    alone = split.moved if timer.work.of_server is None else timer.seconds(cuts[:-1], cuts[1:])
    for moved, (before, behind), joined in zip(alone, split.kept, seconds, strict=True):
        others = [*moved[1:], behind]
        added = [own - both + other for own, both, other in zip(moved, joined[:-1], others, strict=True)]
        added[0] += before + moved[0] - joined[-1]
        wasteful = [was and more > most * own for was, more, own in zip(wasteful, added, moved, strict=True)]
    return wasteful
