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
"""Difference of work between halves, in parts of the mean rank's, for which no document is cut."""

_HALVINGS, _NEARLY = 16, 0.02

_LEVELLINGS, _FEW = 2, 0.1
"""Ranks, as a part of all, that are left to the scheduler where they cannot have as much work in ping."""

Ranges = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""[N] document, start, stop and rank each."""


def bounds_in_half(half: int, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[S] where shares begin and end in a half: who has a document's outer rows, and reads most of its keys, in ping
    has its inner ones in pong."""
    return (1 - high, 1 - low) if half else (low, high)


def ranges_of_shares(
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


def cut_whole(
    length: np.ndarray, dealt: Dealt, budgets: Sequence[np.ndarray], cut: np.ndarray, whole: np.ndarray, work: Work
) -> None:
    """Set where the ``whole`` [S] documents are cut, in ``cut`` [D]: so that each rank has about the same part of its
    work in ping and keeps to both budgets."""
    shares, rate, ranks = dealt.shares, dealt.short_rate, len(budgets[0])
    parts = [column[~whole] for column in (shares.document, shares.rank, shares.low, shares.high)]
    room, more = [], []
    for half, (budget, first, last) in enumerate(((budgets[0], np.zeros_like(cut), cut), (budgets[1], cut, length))):
        _, start, stop, owner = ranges_of_shares(
            parts[0], parts[1], *bounds_in_half(half, parts[2], parts[3]), first, last
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
    """How the work of documents with [N] rows and ``whole`` work grows: with the square of a head's rows, for all of
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
        """[N] rows of a head of every document, so that ranks have [R] ``wanted`` surplus in ping.

        No half has more rows than its room, ``ping`` or ``pong``. Heads are the rows up to one position, which have
        least work, or the same part of each document."""
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
