"""Cutting query ranges out of one document for several servers that take over a part of the work.

A *server* is a rank that computes attention. ``balancer.py`` calls :func:`split_range` when a server, the *sender*, has
too much work. It names one *piece* of the sender, a range of query rows [start, stop) of a document, and the
*receivers*: servers with room. The sender gives one part [low, high) of the piece away. This part is cut into
consecutive ranges, one for each receiver. Example: receivers 5 and 7 get ranges of the piece [0, 1000) with the cuts
400, 500 and 700. Then one gets the rows [400, 500), the other [500, 700), and the sender keeps [0, 400) and [700,
1000).

The part lies where it costs fewest bytes. A range of m query rows that ends at position d moves these m rows. It also
moves up to d rows of k and v. It has about A = m (d - m/2) query-key pairs. Its bytes are Q m + K d, with Q for a query
row and K for a key/value row. For a given A they are least if the range's middle is at sqrt(A (Q + K/2) / K). So ranges
from the middle of a long document are cheapest, and one long range is cheaper than two short ones. Of consecutive
ranges the short ones come first: that way their ends, and so their k,v rows, add up to least.

Array legend: K directions (forward, backward, or both), C receivers, N receivers that are chosen, G places that are
tried for the part.
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
"""The most time that a cut may add, as a part of the time that it moves: each side of a cut reads keys once more.
Costlier cuts are refused while servers can be relieved in another way. So this limits how short a range may be. For its
effect where ranks have few tokens, and for other values of all constants here, see benchmarks/results/planner.md."""

_PLACES = np.linspace(0.0, 1.0, 13)
"""The places that are tried for the part, from 0, at the start of the piece, to 1, at its end. With 5 places plans move
0.1 % more bytes, with 49 as many as with 13."""
_LEAST_BLOCKS = 8
"""The least work that a sender gives away, in kernel tiles of query rows, even if it should lose less. With 32 plans
move 1.5 % more bytes."""
_FEW = 8
"""The most receivers for which the sizes of ranges are corrected once. With more they are corrected three times,
because errors add up from range to range. With 32 the slowest server is as fast."""
_LONG_CONTEXT = 131_072
"""If a piece ends behind this row, the price of a place includes the time for keys that the sender then reads twice.
For shorter documents this time does not change the choice, and counting it makes planning slower."""
_NEVER_WASTEFUL = 32
"""Cuts that leave no range shorter than this many kernel tiles always pay, and are not checked."""
_SLIVER = 8
"""If the sender would keep a rest more than this many times shorter than the range next to it, the rest goes along."""
_FINEST = 0.004
"""Cuts fall on whole kernel tiles of query rows, as long as a tile takes at most this part of a server's mean load.
Else they fall on multiples of a half, a quarter, or at least a sixteenth of a tile."""


@dataclass(frozen=True)
class Timer:
    """Gives the seconds of query ranges, in the directions that are balanced.

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
        """Returns the number of rows that cuts are multiples of: a kernel tile, or a fraction of one (``_FINEST``).

        ``per_row`` [K] is the seconds of a row."""
        block = self.tile
        fine = _FINEST * min(unit / max(seconds, 1e-300) for unit, seconds in zip(self.unit, per_row, strict=True))
        while block > fine and block > max(1, self.tile // 16):
            block //= 2
        return block

    def seconds(self, start: Sequence[float], stop: Sequence[float]) -> list[list[float]]:
        """Returns [K][N] seconds of a handful of ranges [start, stop) on the sender."""
        return self.work.of_few(start, stop, self.sender)

    def seconds_at(self, chosen: Sequence[int], start: Sequence[float], stop: Sequence[float]) -> list[list[float]]:
        """Returns [K][N + 2] seconds of consecutive ranges on the servers that compute them.

        The first and the last range stay at the sender; the others go to the [N] receivers with the indices
        ``chosen``."""
        if self.work.of_server is None:
            return self.seconds(start, stop)
        return self.work.of_few(start, stop, [self.sender, *self.receivers.take(chosen).tolist(), self.sender])


class Excess(NamedTuple):
    """A piece of the sender, and how much work should leave it.

    Attributes:
        start: first query row of the piece.
        stop: one past its last query row.
        seconds: [K] seconds of the whole piece.
        need: [K] seconds that the sender should lose; negative where it is below its limit.
    """

    start: int
    stop: int
    seconds: list[float]
    need: list[float]


class Receivers(NamedTuple):
    """The servers that may take ranges, in order of preference.

    Attributes:
        rank: [C] the servers.
        room: [K, C] seconds that each may still gain.
        distant: [C] float64, 1 for servers on another node than the sender, else 0.
        price: a function of ``low`` [G], ``ends`` [G, N] and the indices of N receivers. It returns [G] prices of
            moving ranges that begin at ``low`` and have these ends: of query rows, and of k,v rows that receivers lack.
    """

    rank: np.ndarray
    room: np.ndarray
    distant: np.ndarray
    price: Callable[[np.ndarray, np.ndarray, list[int]], np.ndarray]


class RangeSplit(NamedTuple):
    """The consecutive ranges [cuts[i], cuts[i + 1]) of a piece, one for each chosen receiver.

    Mostly there are one or two ranges. So all fields are lists: for so few numbers, calls of numpy take longer.

    Attributes:
        chosen: [N] indices of receivers.
        room: [K][N] seconds that each may gain.
        cuts: [N + 1] positions.
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
        """Returns [N] rows of every range."""
        return [stop - start for start, stop in pairwise(self.cuts)]

    @property
    def fit(self) -> list[float]:
        """Returns [N] room of each receiver over the time of its range, in the direction where that is less."""
        directions = [
            [most / max(own, 1e-300) for most, own in zip(room, moved, strict=True)]
            for room, moved in zip(self.room, self.moved, strict=True)
        ]
        return [min(each) for each in zip(*directions, strict=True)]


def least_of(directions: np.ndarray) -> np.ndarray:
    """Returns the smaller of one or two directions: an array [K, ...] becomes [...].

    This is faster than numpy's minimum over an axis of length one or two."""
    return np.minimum(directions[0], directions[-1])


def split_range(excess: Excess, receivers: Receivers, timer: Timer) -> RangeSplit | None:
    """Returns the cheapest ranges that the receivers have room for and that relieve the sender; None if no cut pays."""
    # The size of a range is its query-key pairs. First the pairs that fill each receiver are guessed, receivers and the
    # part's place are chosen, and cuts are rounded. Then sizes are corrected by the seconds that these ranges take. At
    # last ranges that do not fit or do not pay are dropped.
    whole = range_pairs(float(excess.start), float(excess.stop))
    block = timer.block([seconds / (excess.stop - excess.start) for seconds in excess.seconds])
    size, wanted, least = _first_sizes(excess, receivers, timer, whole)
    chosen, sizes = _choose(size, wanted, receivers.distant)
    low = _place(excess, receivers, chosen, sizes, whole, timer)
    room = receivers.room.take(chosen, axis=1).tolist()
    split = _timed(excess, chosen, room, _on_blocks(excess, low, sizes, block), timer)
    # Seconds per pair differ from range to range. So sizes are corrected by the times of the ranges just cut; the place
    # mostly stays.
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
    """Returns [C] pairs that fill each receiver, the pairs that should leave the sender, and the fewest that are worth
    a cut.

    Seconds per pair are those of a sample range in the middle of the piece, which fills the first receiver. They are
    more than those of the whole piece, as a short range has many keys for its pairs."""
    middle = 0.5 * (excess.start + excess.stop)
    per_pair = [seconds / whole for seconds in excess.seconds]
    size = np.minimum(receivers.room[0] / per_pair[0], receivers.room[-1] / per_pair[-1])
    # At least a few tiles are given away, as far as a receiver has room: it is better to give more than needed than
    # nothing.
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

    Receivers are filled in order of preference. The last part goes to the receiver with the least room that suffices,
    if possible on the sender's node. Example: receivers have room for 50, 40, 30 and 12 pairs, and 60 pairs should go.
    The first gets 50 and the last gets 10."""
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
    """Returns the first row of the part, at the cheapest of ``_PLACES``, for ranges with the pairs ``sizes``."""
    total = list(accumulate(sizes))
    if total[-1] >= whole * (1 - 1e-12):
        return float(excess.start)
    highest = stop_after(float(excess.start), whole - total[-1])
    low = excess.start + (highest - excess.start) * _PLACES
    ends = np.minimum(stop_after(low[:, None], np.array(total)), excess.stop)
    price = receivers.price(low, ends, chosen)
    if excess.stop > _LONG_CONTEXT:
        # The sender may keep rows before and behind the part, and then reads keys twice. The price of a place grows by
        # this time, as a part of the time of the work that leaves.
        rows = np.concatenate((low - excess.start, excess.stop - ends[:, -1]))
        seconds = timer.work.on(timer.sender, rows, np.append(low, np.full(len(low), float(excess.stop))))
        kept = (seconds / np.array(timer.unit)[:, None]).sum(axis=0).reshape(2, -1).sum(axis=0)
        least = kept.min()
        whole_piece = sum(own / unit for own, unit in zip(excess.seconds, timer.unit, strict=True))
        price *= 1 + (kept - least) / (whole_piece - least)
    return float(low[price.argmin()])


def _on_blocks(excess: Excess, low: float, sizes: list[float], block: int) -> list[int]:
    """Returns N + 1 cuts, rounded to whole blocks from the piece's start, for ranges with the pairs ``sizes`` from
    ``low`` on.

    The end of the part is rounded up. Then the rows of every range but the first are rounded down. The first range
    becomes longer, so that the part has as many pairs as it should. If the sender would keep a sliver, the sliver goes
    along."""
    # "edges" are the exact borders. squared() of a border grows by twice the pairs of a range, so edges follow from
    # sums of pairs.
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
    # The first range begins where the part, up to its rounded end, has as many pairs as all sizes together.
    bottom = cuts[-1]
    lowest = squared(low) - squared(edges[-1]) + squared(float(high))
    rows = bottom - position_of(max(lowest, 0.25))
    cuts.append(bottom - max(math.ceil(rows / block), 1) * block)
    if cuts[-1] < excess.start + max(block / 2, rows / _SLIVER):
        cuts[-1] = excess.start
    return [max(cut, excess.start) for cut in reversed(cuts)]


def _timed(excess: Excess, chosen: list[int], room: list[list[float]], cuts: list[int], timer: Timer) -> RangeSplit:
    """Returns the split at ``cuts`` with its seconds; receivers whose range has no rows are left out."""
    some = [start < stop for start, stop in pairwise(cuts)]
    if not all(some):
        chosen, cuts = list(compress(chosen, some)), list(compress(cuts, [*some, True]))
        room = [list(compress(each, some)) for each in room]
    seconds = timer.seconds_at(chosen, [excess.start, *cuts], [*cuts, excess.stop])
    return RangeSplit(chosen, room, cuts, [each[1:-1] for each in seconds], [[each[0], each[-1]] for each in seconds])


def _without_misfits(excess: Excess, split: RangeSplit, timer: Timer, block: int) -> RangeSplit | None:
    """Shortens ranges that take longer than their receivers have room for, and drops ranges that still do, or do not
    pay.

    Returns None if no range is left."""
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
        # Ranges must stay consecutive. So with a bad range all ranges on its shorter side are dropped.
        at = bad.index(True)
        kept = slice(at + 1, None) if at < len(bad) / 2 else slice(0, at)
        cuts = split.cuts[at + 1 :] if at < len(bad) / 2 else split.cuts[: at + 1]
        split = _timed(excess, split.chosen[kept], [each[kept] for each in split.room], cuts, timer)
        over = _over(split)
    return None


def _shortened(excess: Excess, split: RangeSplit, over: list[bool], timer: Timer, block: int) -> RangeSplit:
    """Returns the split with the ranges that are ``over`` their room cut to it; the other ranges move into the gap."""
    rows = split.rows
    for at, fit in enumerate(split.fit):
        if over[at]:
            rows[at] = int(rows[at] * fit * 0.999 // block) * block
    # Ranges move to the part's first row if the piece begins there, else to its last row. So if the part reaches an end
    # of the piece, the sender keeps one range and not two.
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
    """Returns [N] whether it costs too much to cut each range from the rows behind it; for the first, also from those
    before.

    A cut costs the seconds of both sides, minus the seconds of one range that joins them."""
    wasteful, cuts, most = [True] * len(split.chosen), split.cuts, timer.most_overhead
    # "seconds" are those of each range joined with the one behind it. The last entry is the first range joined with the
    # rows before it.
    seconds = timer.seconds([*cuts[:-1], excess.start], [*cuts[2:], excess.stop, cuts[1]])
    alone = split.moved if timer.work.of_server is None else timer.seconds(cuts[:-1], cuts[1:])
    for moved, (before, behind), joined in zip(alone, split.kept, seconds, strict=True):
        others = [*moved[1:], behind]
        added = [own - both + other for own, both, other in zip(moved, joined[:-1], others, strict=True)]
        added[0] += before + moved[0] - joined[-1]
        wasteful = [was and more > most * own for was, more, own in zip(wasteful, added, moved, strict=True)]
    return wasteful
