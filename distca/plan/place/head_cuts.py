"""The cuts of whole documents in two, so that every rank has about the same part of its work in ping.

Array legend: D documents, R ranks, S shares, N ranges. All arrays of rows are int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from distca.plan.place.shares import Dealt, Work
from distca.plan.sorting import order_by

_CLOSE = 0.003
"""The difference from the wanted work of ping, in parts of the mean rank's, for which no document is cut: a cut costs
keys that are read twice. With 0.02 nothing changes by 1 % (benchmarks/results/planner.md, as of all constants here)."""

_HALVINGS, _NEARLY = 16, 0.02
"""Steps of the bisection for the row up to which documents are for ping: 16 find it to a 65,536th of the longest. The
second is how much less than the wanted work counts as reached, as a part of it."""

_LEVELLINGS, _FEW = 2, 0.1
"""Times that ping's part of the work is set. Where some ranks have no room for it, the others are lowered to them once.
The second is the part of all ranks that may stay below it, and is left to the scheduler."""

Ranges = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""[N] document, start, stop and rank of query ranges, each int64."""


def bounds_in_nano_batch(nano: int, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[S] where shares begin and end in a nano-batch, 0 for ping and 1 for pong.

    Shares are mirrored in pong. A rank with outer rows of a document reads most of its keys; so who has outer rows in
    ping has inner ones in pong."""
    return (1 - high, 1 - low) if nano else (low, high)


def ranges_of_shares(
    document: np.ndarray, rank: np.ndarray, low: np.ndarray, high: np.ndarray, first: np.ndarray, last: np.ndarray
) -> Ranges:
    """The rows of shares within [first, last) [D] of their documents: a range near the start and its mirror image near
    the end, or the one around the middle.

    Example: of rows [0, 8), the share [0, 0.25) is [0, 1) and [7, 8), and the share [0.25, 1) is [1, 7)."""
    # "outer" and "inner" are where a share begins and ends, in rows from either end. The share that ends at 1 joins its
    # two ranges around the middle.
    first, last = first[document], last[document]
    half = (last - first) // 2
    outer, inner = (low * half).astype(np.int64), (high * half).astype(np.int64)
    middle = (high == 1) & (low < 1)
    start = np.concatenate((first + outer, last - inner))
    stop = np.concatenate((np.where(middle, last - outer, first + inner), last - outer))
    some = np.concatenate((np.ones(len(middle), bool), ~middle)) & (stop > start)
    return np.tile(document, 2)[some], start[some], stop[some], np.tile(rank, 2)[some]


def cut_whole(
    length: np.ndarray, dealt: Dealt, budgets: Sequence[np.ndarray], cut: np.ndarray, whole: np.ndarray, work: Work
) -> None:
    """Sets where whole documents are cut: each rank gets about the same part of its work in ping, within both budgets.

    Args:
        length: [D] tokens.
        dealt: documents on ranks.
        budgets: of ping and pong, [R] tokens each.
        cut: [D] rows of each document in ping; those of whole documents are written here.
        whole: [S] bool, the shares that are whole documents.
        work: of query ranges.
    """
    # For each nano-batch and rank: the room that documents in shares leave, and the work of these documents and of the
    # filler ("more").
    shares, rate, ranks = dealt.shares, dealt.short_rate, len(budgets[0])
    parts = [column[~whole] for column in (shares.document, shares.rank, shares.low, shares.high)]
    room, more = [], []
    for nano, (budget, first, last) in enumerate(((budgets[0], np.zeros_like(cut), cut), (budgets[1], cut, length))):
        _, start, stop, owner = ranges_of_shares(
            parts[0], parts[1], *bounds_in_nano_batch(nano, parts[2], parts[3]), first, last
        )
        room.append(budget - np.bincount(owner, stop - start, ranks))
        more.append(np.bincount(owner, work(start, stop), ranks) + rate * room[-1])
    document = shares.document[whole]
    surplus = dealt.work - rate * length
    total = np.bincount(shares.rank[whole], surplus[document], ranks) + more[0] + more[1]
    mine = np.flatnonzero(whole)
    mine = mine[order_by(shares.rank[mine])]
    document, owner = shares.document[mine], shares.rank[mine]
    bounds = np.searchsorted(owner, np.arange(ranks + 1)).tolist()
    own = length[document]
    square, slope = _growth(own, dealt.work[document], work)
    documents = _Documents(owner, own, square, slope - rate, square / own**2)
    columns = [x.tolist() for x in (own, surplus[document], square, documents.slope)]
    # Shares may overfill a nano-batch: what exceeds it is cut off later (home_rows.py), and nothing else has room.
    room = [np.maximum(each, 0.0) for each in room]
    spaces, level = [each.tolist() for each in room], dealt.split.ping
    for _ in range(_LEVELLINGS):
        wanted = level * total - more[0]
        found: list[int] = []
        off = np.zeros(ranks)
        for rank, (begin, end) in enumerate(pairwise(bounds)):
            if begin < end:
                first, second, third, fourth = (column[begin:end] for column in columns)
                there = _OnRank(first, second, third, fourth, spaces[0][rank], spaces[1][rank])
                cuts, off[rank] = there.cuts(float(wanted[rank]))
                found += cuts
        head = np.array(found, np.int64)
        again = np.flatnonzero(off[owner] > 0)
        if len(again):
            # Where no choice of whole documents and one cut fits, all documents of a rank are cut. Heads have less work
            # than whole documents of as many rows, so they are taken only where they come nearer to what is wanted.
            heads = documents.take(again).heads(wanted, *room)
            nearer = np.abs(wanted - documents.take(again).surplus_of(heads, ranks)) < off
            head[again] = np.where(nearer[owner[again]], heads, head[again])
        cut[document] = head
        reached = (more[0] + documents.surplus_of(head, ranks)) / np.maximum(total, 1e-300)
        # Where some ranks have no room for so much work in ping, the others get no more than these.
        lowest = float(np.quantile(reached, _FEW))
        if lowest > level * (1 - _NEARLY):
            break
        level = lowest


def _growth(length: np.ndarray, whole: np.ndarray, work: Work) -> tuple[np.ndarray, np.ndarray]:
    """Fits the work of a head of p of a document's rows as square · p² + slope · rows · p.

    Returns [N] ``square`` and [N] ``slope``, from the work of the ``whole`` documents and of their first halves."""
    half = length // 2
    part = np.maximum(half / length, 1e-9)
    # whole = square + slope * rows; of the first half: square * part^2 + slope * rows * part.
    slope = (work(np.zeros_like(half), half) - whole * part**2) / (length * np.maximum(part - part**2, 1e-9))
    slope = np.where(length > 1, slope, 0.0)
    return whole - slope * length, slope


class _OnRank(NamedTuple):
    """A rank's whole documents, longest first. Array legend: W of them.

    Attributes:
        rows: [W] tokens.
        surplus: [W] work, less the work of as many tokens of filler.
        square: [W] part of the work that grows with the square of a head's rows.
        slope: [W] the surplus that grows with the rows, per row.
        ping: tokens that ping has room for.
        pong: tokens that pong has room for.
    """

    rows: list[int]
    surplus: list[float]
    square: list[float]
    slope: list[float]
    ping: float
    pong: float

    def cuts(self, wanted: float) -> tuple[list[int], float]:
        """[W] rows in ping of each document, so that ping has ``wanted`` surplus, and how far off that is.

        Each document, longest first, goes to the nano-batch that lacks more, and has the room. At most one is cut. The
        distance is 0 where it is close enough, and infinite where a document has no room."""
        missing, of_pong = wanted, sum(self.surplus) - wanted
        room = [self.ping, self.pong]
        cuts: list[int] = []
        for own, more in zip(self.rows, self.surplus, strict=True):
            nano = 0 if missing > of_pong else 1
            if room[nano] < own:
                nano = 1 - nano
                if room[nano] < own:
                    return [0] * len(self.rows), inf
            room[nano] -= own
            if nano:
                of_pong -= more
                cuts.append(0)
            else:
                missing -= more
                cuts.append(own)
        if abs(missing) <= _CLOSE:
            return cuts, 0.0
        # Where ping lacks work, it gets the head of one of pong's documents; else the tail of one of its own leaves it.
        # The shortest document that has enough surplus and room is cut.
        giver = 1 if missing > 0 else 0
        for at in range(len(cuts) - 1, -1, -1):
            if (cuts[at] == 0) != (giver == 1) or self.surplus[at] < abs(missing):
                continue
            head = missing if giver else self.surplus[at] + missing
            where = int(_head_with(head, self.rows[at], self.square[at], self.slope[at]))
            if (where <= room[0]) if giver else (self.rows[at] - where <= room[1]):
                cuts[at] = where
                return cuts, 0.0
        return cuts, abs(missing)


class _Documents(NamedTuple):
    """The whole documents of all ranks, those of a rank one after the other, longest first. Array legend: N documents.

    Attributes:
        rank: [N] home rank.
        rows, square, slope: as in :class:`_OnRank`.
        dense: [N] the square part of the work over the square of the rows.
    """

    rank: np.ndarray
    rows: np.ndarray
    square: np.ndarray
    slope: np.ndarray
    dense: np.ndarray

    def take(self, chosen: np.ndarray) -> _Documents:
        return _Documents(*(column[chosen] for column in self))

    def surplus_of(self, heads: np.ndarray, ranks: int) -> np.ndarray:
        """[R] surplus in ping, where [N] rows of each document are there."""
        return np.bincount(self.rank, (self.dense * heads + self.slope) * heads, ranks)

    def heads(self, wanted: np.ndarray, ping: np.ndarray, pong: np.ndarray) -> np.ndarray:
        """[N] rows of every document's head in ping, so that ranks have [R] ``wanted`` surplus there.

        Neither nano-batch gets more rows than its [R] room, ``ping`` or ``pong``. On each rank, heads end at one
        position for all documents, which leaves ping least work for its rows. Where that is too little, they are the
        same part of each document."""
        # Bisection, on all ranks at once, for the last position that fits ping and is needed: for its work, or because
        # pong has no room for what is behind it.
        at, own = self.rank, self.rows
        ranks, total = len(wanted), np.bincount(at, own, len(wanted))
        low, high = np.zeros(ranks), np.zeros(ranks)
        np.maximum.at(high, at, own)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            heads = np.minimum(own, middle[at])
            tokens, found = np.bincount(at, heads, ranks), self.surplus_of(heads, ranks)
            over = (tokens > ping) | ((found > wanted) & (tokens > total - pong))
            low, high = np.where(over, low, middle), np.where(over, middle, high)
        enough = self.surplus_of(np.minimum(own, low[at]), ranks) >= wanted * (1 - _NEARLY)
        enough |= (total - pong >= ping) | (total == 0)
        heads = np.minimum(low[at].astype(np.int64), own)
        for rank in np.flatnonzero(~enough).tolist():
            here = slice(*np.searchsorted(at, (rank, rank + 1)).tolist())
            slope = float((self.slope[here] * own[here]).sum())
            part = _head_with(float(wanted[rank]), 1.0, float(self.square[here].sum()), slope)
            part = min(max(part, 1 - pong[rank] / total[rank]), ping[rank] / total[rank], 1.0)
            heads[here] = part * own[here]
        # Rounding down took rows from ping, and pong may have no room for them: documents of that rank give them back,
        # one after the other.
        over = total - np.bincount(at, heads, ranks) - np.floor(pong)
        spare = own - heads
        before = np.cumsum(spare) - spare
        before -= before[np.searchsorted(at, at)]
        return heads + np.clip(over[at] - before, 0, spare).astype(np.int64)


def _head_with(surplus: float, rows: float, square: float, slope: float) -> float:
    """Rows of the head that has this surplus, the root of dense · rows² + slope · rows; at most ``rows``."""
    dense = max(square, 1e-12) / rows**2
    return float(min(max((-slope + (slope**2 + 4 * dense * max(surplus, 0.0)) ** 0.5) / (2 * dense), 0.0), rows))
