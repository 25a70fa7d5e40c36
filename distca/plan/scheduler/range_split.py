"""Cuts query ranges out of a document, for servers that take over part of the work of another server.

A *server* is a rank that computes attention. ``balancer.py`` calls :func:`split_range` for a server with too much work,
the *sender*, and a *piece*: a range of query rows [start, stop) of one document that the sender computes. *Receivers*
are servers with room for more work. The sender gives up one part of the piece. This part is cut into consecutive
ranges, one for each receiver. Example: the piece [0, 1000) gets the cuts 400, 500 and 700. Then one receiver gets the
rows [400, 500) and another [500, 700). The sender keeps [0, 400) and [700, 1000).

Where the part lies decides how many bytes travel. A range of m query rows that ends at position d has about a = m (d -
m/2) query-key pairs. The m query rows must travel, and up to d rows of keys and values. A query row has q bytes, and a
k,v row has p bytes, so q m + p d bytes travel. For a given number of pairs, this is least if the middle of the range is
at sqrt(a (q + p/2) / p). So the cheapest ranges lie in the middle of a long document, and one long range is cheaper
than two short ranges. Of consecutive ranges, the range with fewest pairs comes first, because all ranges together then
need fewest k,v rows.

Array legend: K directions (forward, backward, or both), C receivers, N chosen receivers, G places that are tried for
the part. [K][N] is a list of K lists.
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
"""The most time that a cut may add, as a part of the time that it moves. A cut adds time because both of its sides read
the same keys. So no range is very short. Where nothing else relieves a server, ``scheduler.py`` allows more
(benchmarks/results/planner.md)."""

_PLACES = np.linspace(0.0, 1.0, 13)
"""The places that are tried for the part: at 0 the part begins where the piece begins, at 1 it ends where the piece
ends."""
_LEAST_BLOCKS = 8
"""The least work that a sender gives up, in kernel tiles of query rows, even if less would do. The value 32 makes plans
move 1.5 % more bytes (benchmarks/results/planner.md)."""
_FEW = 8
"""The most receivers for which the sizes of ranges are corrected only once. With more receivers they are corrected
three times, because errors add up from range to range. The value 2 makes the slowest server 0.16 % slower
(benchmarks/results/planner.md)."""
_LONG_CONTEXT = 131_072
"""If a piece ends behind this row, the price of a place includes the time in which the sender reads keys twice. In
shorter documents this time hardly changes the choice, and planning is faster without it."""
_NEVER_WASTEFUL = 32
"""Cuts are not checked for wasted time if every range has at least this many kernel tiles."""
_SLIVER = 8
"""The sender keeps a rest of a piece if this many times the rest's rows are at least the rows of the range beside it.
Otherwise the range takes the rest too."""
_FINEST = 0.004
"""Cuts fall on whole kernel tiles of query rows, as long as a tile takes at most this part of a server's mean load.
Otherwise they fall on halves, quarters, eighths or sixteenths of a tile."""


@dataclass(frozen=True)
class Timer:
    """Gives the seconds of query ranges, in the directions that are balanced.

    Attributes:
        work: the work of ranges on every server.
        unit: [K] mean load of a server, in seconds.
        most_overhead: most time that a cut may add, as a part of the time that the cut moves.
        sender: the server that gives work.
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
        """Returns the rows of a block: a kernel tile or a fraction of a tile (``_FINEST``). Cuts fall between blocks.

        ``per_row`` [K] is the seconds of a query row."""
        block = self.tile
        fine = _FINEST * min(unit / max(seconds, 1e-300) for unit, seconds in zip(self.unit, per_row, strict=True))
        while block > fine and block > max(1, self.tile // 16):
            block //= 2
        return block

    def seconds(self, start: Sequence[float], stop: Sequence[float]) -> list[list[float]]:
        """Returns [K][N] seconds of the ranges [start, stop) on the sender."""
        return self.work.of_few(start, stop, self.sender)

    def seconds_at(self, chosen: Sequence[int], start: Sequence[float], stop: Sequence[float]) -> list[list[float]]:
        """Returns [K][N + 2] seconds of consecutive ranges on their servers.

        The first and the last range stay at the sender. The others go to the receivers with the [N] indices
        ``chosen``."""
        if self.work.of_server is None:
            return self.seconds(start, stop)
        return self.work.of_few(start, stop, [self.sender, *self.receivers.take(chosen).tolist(), self.sender])


class Excess(NamedTuple):
    """A piece of the sender, and how much work should leave it.

    Attributes:
        start: first query row of the piece.
        stop: one past the last query row of the piece.
        seconds: [K] seconds of the whole piece.
        need: [K] seconds that the sender should lose; negative in a direction where the sender is below its limit.
    """

    start: int
    stop: int
    seconds: list[float]
    need: list[float]


class Receivers(NamedTuple):
    """The servers that may take ranges, in order of preference.

    Attributes:
        rank: [C] the servers.
        room: [K, C] seconds that each receiver may still gain.
        distant: [C] float64, 1 for receivers on another node than the sender's, else 0.
        price: a function of ``low`` [G], ``ends`` [G, N] and N indices of receivers. At place g the first range begins
            at ``low[g]``, and the ranges end at ``ends[g]``. The function returns [G] prices: the bytes of query rows,
            and of the k,v rows that receivers lack. Bytes between nodes are multiplied by their price.
    """

    rank: np.ndarray
    room: np.ndarray
    distant: np.ndarray
    price: Callable[[np.ndarray, np.ndarray, list[int]], np.ndarray]


class RangeSplit(NamedTuple):
    """The consecutive ranges [cuts[i], cuts[i + 1]) of a piece, one for each chosen receiver.

    Mostly there are one or two ranges. For so few numbers lists are faster than numpy arrays.

    Attributes:
        chosen: [N] indices of receivers.
        room: [K][N] seconds that each receiver may gain.
        cuts: [N + 1] positions.
        moved: [K][N] seconds that each receiver gains.
        kept: [K][2] seconds that the sender keeps before and behind the ranges.
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
        """Returns [N] how much room each receiver has, over the time of its range; the least of all directions."""
        directions = [
            [most / max(own, 1e-300) for most, own in zip(room, moved, strict=True)]
            for room, moved in zip(self.room, self.moved, strict=True)
        ]
        return [min(each) for each in zip(*directions, strict=True)]


def least_of(directions: np.ndarray) -> np.ndarray:
    """Returns the smaller of one or two directions: an array [K, ...] becomes [...]."""
    return np.minimum(directions[0], directions[-1])


def split_range(excess: Excess, receivers: Receivers, timer: Timer) -> RangeSplit | None:
    """Returns the cheapest ranges that the receivers have room for and that relieve the sender; None if no cut pays."""
    # A range's size is its number of query-key pairs. First sizes are guessed from seconds per pair, receivers and the
    # part's place are chosen, and cuts are rounded. In the loop sizes are corrected. At the end a range is dropped if
    # its receiver has too little room or its cut does not pay.
    whole = range_pairs(float(excess.start), float(excess.stop))
    block = timer.block([seconds / (excess.stop - excess.start) for seconds in excess.seconds])
    size, wanted, least = _first_sizes(excess, receivers, timer, whole)
    chosen, sizes = _choose(size, wanted, receivers.distant)
    low = _place(excess, receivers, chosen, sizes, whole, timer)
    room = receivers.room.take(chosen, axis=1).tolist()
    split = _timed(excess, chosen, room, _on_blocks(excess, low, sizes, block), timer)
    # Seconds per pair differ from range to range, so sizes are corrected by the times of the newest ranges.
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
    """Returns [C] pairs that fill each receiver, the pairs that should leave the sender, and the fewest pairs that are
    worth a cut.

    The pairs that fill a receiver are guessed from the seconds of a sample range in the middle of the piece."""
    middle = 0.5 * (excess.start + excess.stop)
    per_pair = [seconds / whole for seconds in excess.seconds]
    size = np.minimum(receivers.room[0] / per_pair[0], receivers.room[-1] / per_pair[-1])
    # At least a few tiles are given up, as far as receivers have room.
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

    Receivers are filled in order of preference. The rest goes to the receiver with the least room that suffices, on the
    sender's node if possible. Example: receivers have room for 50, 40, 30 and 12 pairs, and 60 pairs should go. The
    first receiver gets 50 pairs and the last gets 10."""
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
    """Returns the first row of the part at the cheapest of ``_PLACES``, for ranges of ``sizes`` pairs."""
    total = list(accumulate(sizes))
    if total[-1] >= whole * (1 - 1e-12):
        return float(excess.start)
    highest = stop_after(float(excess.start), whole - total[-1])
    low = excess.start + (highest - excess.start) * _PLACES
    ends = np.minimum(stop_after(low[:, None], np.array(total)), excess.stop)
    price = receivers.price(low, ends, chosen)
    if excess.stop > _LONG_CONTEXT:
        # The sender may keep rows before and behind the part, and then reads some keys twice. The price of a
        # place is raised in proportion to the time that the sender keeps more than at the best place.
        rows = np.concatenate((low - excess.start, excess.stop - ends[:, -1]))
        seconds = timer.work.on(timer.sender, rows, np.append(low, np.full(len(low), float(excess.stop))))
        kept = (seconds / np.array(timer.unit)[:, None]).sum(axis=0).reshape(2, -1).sum(axis=0)
        least = kept.min()
        whole_piece = sum(own / unit for own, unit in zip(excess.seconds, timer.unit, strict=True))
        price *= 1 + (kept - least) / (whole_piece - least)
    return float(low[price.argmin()])


def _on_blocks(excess: Excess, low: float, sizes: list[float], block: int) -> list[int]:
    """Returns [N + 1] cuts for ranges of ``sizes`` pairs that begin at ``low``, on whole blocks from the piece's start.

    The end of the part is rounded up, and the rows of every range but the first are rounded down. The first range
    becomes longer instead. At both ends the part takes a small rest of the piece too (``_SLIVER``)."""
    # "edges" are the exact cuts. From one edge to the next, squared() grows by twice the pairs between them.
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
    # The first range begins where the part, up to its rounded end, has as many pairs as ``sizes`` together.
    bottom = cuts[-1]
    lowest = squared(low) - squared(edges[-1]) + squared(float(high))
    rows = bottom - position_of(max(lowest, 0.25))
    cuts.append(bottom - max(math.ceil(rows / block), 1) * block)
    if cuts[-1] < excess.start + max(block / 2, rows / _SLIVER):
        cuts[-1] = excess.start
    return [max(cut, excess.start) for cut in reversed(cuts)]


def _timed(excess: Excess, chosen: list[int], room: list[list[float]], cuts: list[int], timer: Timer) -> RangeSplit:
    """Returns the split at ``cuts`` with its seconds, without receivers whose range has no rows."""
    some = [start < stop for start, stop in pairwise(cuts)]
    if not all(some):
        chosen, cuts = list(compress(chosen, some)), list(compress(cuts, [*some, True]))
        room = [list(compress(each, some)) for each in room]
    seconds = timer.seconds_at(chosen, [excess.start, *cuts], [*cuts, excess.stop])
    return RangeSplit(chosen, room, cuts, [each[1:-1] for each in seconds], [[each[0], each[-1]] for each in seconds])


def _without_misfits(excess: Excess, split: RangeSplit, timer: Timer, block: int) -> RangeSplit | None:
    """Returns the split without bad ranges; None if no range is left.

    A range is bad if its cut does not pay, or if it takes longer than its receiver has room for even when shortened."""
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
        # The other ranges must stay consecutive. So all ranges on the shorter side of a bad one are dropped too.
        at = bad.index(True)
        kept = slice(at + 1, None) if at < len(bad) / 2 else slice(0, at)
        cuts = split.cuts[at + 1 :] if at < len(bad) / 2 else split.cuts[: at + 1]
        split = _timed(excess, split.chosen[kept], [each[kept] for each in split.room], cuts, timer)
        over = _over(split)
    return None


def _shortened(excess: Excess, split: RangeSplit, over: list[bool], timer: Timer, block: int) -> RangeSplit:
    """Returns the split with ranges that are ``over`` their room shortened, and the other ranges moved into the
    gaps."""
    rows = split.rows
    for at, fit in enumerate(split.fit):
        if over[at]:
            rows[at] = int(rows[at] * fit * 0.999 // block) * block
    # If the part begins where the piece begins, the part keeps its first row, else its last row. So if the part lies at
    # one end of the piece, the sender keeps one range and not two.
    if split.cuts[0] == excess.start and split.cuts[-1] < excess.stop:
        cuts = list(accumulate(rows, initial=split.cuts[0]))
    else:
        cuts = list(accumulate((-own for own in reversed(rows)), initial=split.cuts[-1]))[::-1]
    return _timed(excess, split.chosen, split.room, cuts, timer)


def _over(split: RangeSplit) -> list[bool]:
    """Returns [N] whether each range takes longer than its receiver has room for."""
    over = [False] * len(split.chosen)
    for room, moved in zip(split.room, split.moved, strict=True):
        over = [was or own > most * (1 + 1e-9) for was, own, most in zip(over, moved, room, strict=True)]
    return over


def _wasteful(excess: Excess, split: RangeSplit, timer: Timer) -> list[bool]:
    """Returns [N] whether it costs too much to cut each range from the rows behind it. The first range is also cut from
    the rows before it.

    A cut costs the seconds of both sides, minus the seconds of one range that joins both sides."""
    wasteful, cuts, most = [True] * len(split.chosen), split.cuts, timer.most_overhead
    # "seconds" has each range joined with the rows behind it. The last element has the first range joined with the rows
    # before it.
    seconds = timer.seconds([*cuts[:-1], excess.start], [*cuts[2:], excess.stop, cuts[1]])
    alone = split.moved if timer.work.of_server is None else timer.seconds(cuts[:-1], cuts[1:])
    for moved, (before, behind), joined in zip(alone, split.kept, seconds, strict=True):
        others = [*moved[1:], behind]
        added = [own - both + other for own, both, other in zip(moved, joined[:-1], others, strict=True)]
        added[0] += before + moved[0] - joined[-1]
        wasteful = [was and more > most * own for was, more, own in zip(wasteful, added, moved, strict=True)]
    return wasteful
