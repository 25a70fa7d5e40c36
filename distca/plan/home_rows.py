"""From documents on ranks to the rows of every nano-batch: what is computed in ping, what in pong, and what fills up.

A rank that has all of its documents in both halves moves nothing: the first rows of a document are computed in ping,
the others in pong, whose queries find the keys of the first ones at home. So both halves are made of one placement.
Every rank puts about the same part of its work into ping: whole documents where that comes out, and one that is cut.
Where ranks are full of documents so long that half their rows are a head with little work, ping has less work than
pong, on all ranks alike. A document in shares is cut at the same place for all of them.

Array legend: D documents, R ranks, N ranges. All arrays of rows are int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from distca.plan.nano_split import Stream
from distca.plan.placement import Dealt, Work
from distca.plan.sorting import merged, order_by

_CLOSE = 0.003
"""Difference of work between halves, in parts of the mean rank's, for which no document is cut."""
_HALVINGS, _NEARLY = 16, 0.02
_HEAD = 0.5
"""Part of the rows that is for ping of documents that are in parts only because no rank had room for all of it."""
_LEVELLINGS, _FEW = 2, 0.1
"""Ranks, as a part of all, that are left to the scheduler where they cannot have as much work in ping."""

Ranges = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""[N] document, start, stop and rank each."""


def home_rows(
    length: np.ndarray, dealt: Dealt, budgets: Sequence[np.ndarray], work: Work, node: np.ndarray
) -> list[tuple[Stream, np.ndarray]] | None:
    """The ranges of every nano-batch and the rank of each, so that all budgets are met exactly.

    Args:
        length: [D] tokens.
        dealt: documents on ranks.
        budgets: by nano-batch, [R] tokens.
        work: of query ranges.
        node: [R] node of every rank.

    Returns:
        None where documents in shares are more than a half has room for.
    """
    shares = dealt.shares
    whole = (shares.low == 0) & (shares.high == 1)
    cut = length.copy()
    if len(budgets) == 2:
        # Parts of other documents are where tokens fit, however many rows pong has for shares.
        cut = np.rint(length * np.where(dealt.long, dealt.halves.head, _HEAD)).astype(np.int64)
        _cut_whole(length, dealt, budgets, cut, whole, work)
    keys = np.bincount(shares.rank, length[shares.document], len(node))
    found = []
    in_ping = 0
    for half, budget in enumerate(budgets):
        low, high = (np.zeros_like(cut), cut) if half == 0 else (cut, length)
        begin, end = _bounds(half, shares.low, shares.high)
        placed = [_ranges(shares.document, shares.rank, begin, end, low, high)]
        placed[0], cut_off = _within(placed[0], budget)
        room = budget - np.bincount(placed[0][3], placed[0][2] - placed[0][1], len(budget)).astype(np.int64)
        left, nobody, begin, end = _columns(dealt.left)
        begin, end = _bounds(half, begin, end)
        beside, cut_off = _beside(cut_off, room, keys, node)
        placed.append(beside)
        missed = [_ranges(left, nobody, begin, end, low, high)[:3], cut_off[:3]]
        fixed = tuple(np.concatenate(column) for column in zip(*missed, strict=True))
        short = dealt.short
        spare = int(room.sum()) - int((fixed[2] - fixed[1]).sum())
        own = length[short]
        if half == 0:
            if spare < 0 or spare > own.sum():
                return None
            # The first of the short documents, one of them cut.
            stop = np.clip(spare - (np.cumsum(own) - own), 0, own)
            start, in_ping = np.zeros_like(stop), spare
        else:
            start, stop = np.clip(in_ping - (np.cumsum(own) - own), 0, own), own
        some = stop > start
        filler = (short[some], start[some], stop[some])
        document, start, stop = (np.concatenate(pair) for pair in zip(fixed, filler, strict=True))
        placed.append(_laid(document, start, stop, room))
        document, start, stop, rank = (np.concatenate(column) for column in zip(*placed, strict=True))
        found.append((Stream(document, start, stop), rank))
    return found


def _bounds(half: int, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[S] where shares begin and end in a half: who has a document's outer rows, and reads most of its keys, in ping
    has its inner ones in pong."""
    return (1 - high, 1 - low) if half else (low, high)


def _columns(left: list[tuple[int, float, float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    document, low, high = zip(*left, strict=True) if left else ((), (), ())
    none = np.zeros(len(document), np.int64)
    return np.array(document, np.int64), none, np.array(low, np.float64), np.array(high, np.float64)


def _ranges(
    document: np.ndarray, rank: np.ndarray, low: np.ndarray, high: np.ndarray, first: np.ndarray, last: np.ndarray
) -> Ranges:
    """The rows of shares within [first, last) [D] of their documents: a range near the start and its mirror image near
    the end, or the one around the middle."""
    first, last = first[document], last[document]
    half = (last - first) // 2
    outer, inner = (low * half).astype(np.int64), (high * half).astype(np.int64)
    middle = (high == 1) & (low < 1)
    start = np.concatenate((first + outer, last - inner))
    stop = np.concatenate((np.where(middle, last - outer, first + inner), last - outer))
    some = np.concatenate((np.ones(len(middle), bool), ~middle)) & (stop > start)
    return np.tile(document, 2)[some], start[some], stop[some], np.tile(rank, 2)[some]


def _within(ranges: Ranges, budget: np.ndarray) -> tuple[Ranges, Ranges]:
    """Ranges that keep to the [R] budgets, and what had to be cut off."""
    document, start, stop, rank = ranges
    over = np.bincount(rank, stop - start, len(budget)).astype(np.int64) - budget
    if (over <= 0).all():
        nothing = np.zeros(0, np.int64)
        return ranges, (nothing, nothing, nothing, nothing)
    order = np.lexsort((start - stop, rank))
    cut = np.zeros_like(start)
    for at in order[over[rank[order]] > 0].tolist():
        cut[at] = min(over[rank[at]], stop[at] - start[at])
        over[rank[at]] -= cut[at]
    kept, lost = cut < stop - start, cut > 0
    return (
        (document[kept], start[kept], (stop - cut)[kept], rank[kept]),
        (document[lost], (stop - cut)[lost], stop[lost], rank[lost]),
    )


def _beside(ranges: Ranges, room: np.ndarray, keys: np.ndarray, node: np.ndarray) -> tuple[Ranges, Ranges]:
    """Put ranges that were cut off, the longest first, each on the rank of its own node that reads fewest of the [R]
    ``keys`` and has enough of the [R] tokens of ``room`` left, or else on the one of any that has most; and what fits
    nowhere. What they take of the room, and the keys that they add, is counted."""
    document, start, stop, rank = ranges
    rows, target = stop - start, np.full(len(rank), -1)
    for at in np.argsort(-rows, kind="stable").tolist():
        near = np.flatnonzero((node == node[rank[at]]) & (room >= rows[at]))
        best = near[keys[near].argmin()] if len(near) else room.argmax()
        if room[best] >= rows[at]:
            room[best] -= rows[at]
            keys[best] += stop[at]
            target[at] = best
    some = target >= 0
    return (
        (document[some], start[some], stop[some], target[some]),
        (document[~some], start[~some], stop[~some], rank[~some]),
    )


def _laid(document: np.ndarray, start: np.ndarray, stop: np.ndarray, room: np.ndarray) -> Ranges:
    """Lay ranges end to end into [R] tokens of room, which they fill exactly, cut where a rank's room ends."""
    ends, tops = np.cumsum(stop - start), np.cumsum(room)
    begins = ends - (stop - start)
    cuts = merged(begins, tops[tops < (ends[-1] if len(ends) else 0)])
    uppers = np.append(cuts[1:], ends[-1:])
    at = np.searchsorted(ends, cuts, side="right")
    first = start[at] + cuts - begins[at]
    return document[at], first, first + uppers - cuts, np.searchsorted(tops, cuts, side="right")


def _cut_whole(
    length: np.ndarray, dealt: Dealt, budgets: Sequence[np.ndarray], cut: np.ndarray, whole: np.ndarray, work: Work
) -> None:
    """Set where the ``whole`` [S] documents are cut, in ``cut`` [D]: so that each rank has about the same part of its
    work in ping and keeps to both budgets."""
    shares, rate, ranks = dealt.shares, dealt.short_rate, len(budgets[0])
    parts = [column[~whole] for column in (shares.document, shares.rank, shares.low, shares.high)]
    room, more = [], []
    for half, (budget, first, last) in enumerate(((budgets[0], np.zeros_like(cut), cut), (budgets[1], cut, length))):
        _, start, stop, owner = _ranges(parts[0], parts[1], *_bounds(half, parts[2], parts[3]), first, last)
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
    # Shares may overfill a half: what they have too much is cut off later, and nothing else has room there.
    room = [np.maximum(each, 0.0) for each in room]
    spaces, level = [each.tolist() for each in room], dealt.halves.ping
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
            # Heads have less work than whole documents of as many rows: too little where there is no room for more.
            heads = documents.take(again).heads(wanted, *room)
            nearer = np.abs(wanted - documents.take(again).surplus_of(heads, ranks)) < off
            head[again] = np.where(nearer[owner[again]], heads, head[again])
        cut[document] = head
        reached = (more[0] + documents.surplus_of(head, ranks)) / np.maximum(total, 1e-300)
        # Where some ranks have no room for so much work in ping, the others have no more.
        lowest = float(np.quantile(reached, _FEW))
        if lowest > level * (1 - _NEARLY):
            break
        level = lowest


def _growth(length: np.ndarray, whole: np.ndarray, work: Work) -> tuple[np.ndarray, np.ndarray]:
    """Of documents with [N] rows and ``whole`` work: the work that grows with the square of a head's rows, for all of
    them, and per row what grows with the rows."""
    half = length // 2
    part = np.maximum(half / length, 1e-9)
    # whole = square + slope * rows; of the half: square * part^2 + slope * rows * part.
    slope = (work(np.zeros_like(half), half) - whole * part**2) / (length * np.maximum(part - part**2, 1e-9))
    slope = np.where(length > 1, slope, 0.0)
    return whole - slope * length, slope


class _OnRank(NamedTuple):
    """A rank's whole documents, longest first. Array legend: W of them.

    Attributes:
        rows: [W].
        surplus: [W] work less that of as many rows of short documents.
        square: [W] part of the work that grows with the square of a head's rows.
        slope: [W] surplus per row beside that.
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
        """[W] rows in ping, of one document a part, so that ping has ``wanted`` surplus and neither half more rows than
        it has room for; and how far off that is, 0 where it is close: infinitely where there is no room."""
        missing, of_pong = wanted, sum(self.surplus) - wanted
        room = [self.ping, self.pong]
        cuts: list[int] = []
        for own, more in zip(self.rows, self.surplus, strict=True):
            half = 0 if missing > of_pong else 1
            if room[half] < own:
                half = 1 - half
                if room[half] < own:
                    return [0] * len(self.rows), inf
            room[half] -= own
            if half:
                of_pong -= more
                cuts.append(0)
            else:
                missing -= more
                cuts.append(own)
        if abs(missing) <= _CLOSE:
            return cuts, 0.0
        # Ping lacks work: the head of one of pong's documents goes there; or the tail of one of its own leaves.
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
    """[N] whole documents of all ranks, those of a rank one after the other, longest first: the rank of each; rows,
    square and slope as of :class:`_OnRank`; and ``dense``, the square part over the rows' square."""

    rank: np.ndarray
    rows: np.ndarray
    square: np.ndarray
    slope: np.ndarray
    dense: np.ndarray

    def take(self, chosen: np.ndarray) -> _Documents:
        return _Documents(*(column[chosen] for column in self))

    def surplus_of(self, heads: np.ndarray, ranks: int) -> np.ndarray:
        """[R] of heads with [N] rows."""
        return np.bincount(self.rank, (self.dense * heads + self.slope) * heads, ranks)

    def heads(self, wanted: np.ndarray, ping: np.ndarray, pong: np.ndarray) -> np.ndarray:
        """[N] rows of a head of every document, so that ranks have [R] ``wanted`` surplus in ``ping`` and no half more
        rows than it has room for: the rows up to one position, which have least work, or the same part of each."""
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
        # Rounding took rows from ping, which pong may have no room for.
        over = total - np.bincount(at, heads, ranks) - np.floor(pong)
        spare = own - heads
        before = np.cumsum(spare) - spare
        before -= before[np.searchsorted(at, at)]
        return heads + np.clip(over[at] - before, 0, spare).astype(np.int64)


def _head_with(surplus: float, rows: float, square: float, slope: float) -> float:
    """Rows of a head that has this surplus."""
    dense = max(square, 1e-12) / rows**2
    return float(min(max((-slope + (slope**2 + 4 * dense * max(surplus, 0.0)) ** 0.5) / (2 * dense), 0.0), rows))
