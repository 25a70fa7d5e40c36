"""Divides documents, already dealt to ranks, between *ping* and *pong*, the two parts of a micro-batch.

- A document's first rows, its *head*, are computed in ping, and its other rows, its *tail*, in pong.
- A document on several ranks is cut into *shares* (:func:`ranges_of_shares`). A document on one rank is one share, and
  :func:`cut_whole` chooses its head.
- *Filler* is the shortest documents, which fill the room that other documents leave in ping and in pong.
- *Work* is the time of attention, in units of the mean work of a rank. The *surplus* of a document is its work minus
  the work of as many tokens of filler.

Array legend: D documents, R ranks, S shares, W documents that are on one rank alone. N is the number of ranges, or of
documents that a function gets. Rows are int64. Constants were compared with other values:
``benchmarks/planner_constants.py``, benchmarks/results/planner.md.
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
"""A rank whose work in ping differs from the intended work by at most this part of a rank's mean work cuts no document.
A cut costs time, as pong reads the keys of the head again."""

_HALVINGS = 16
"""The steps of the bisection in :meth:`_Documents.heads`. After 16 steps the error is a 65,536th of the rank's longest
document."""
_NEARLY = 0.02
"""A rank's work or surplus in ping may fall short of the intended value by this part of that value."""

_LEVELLINGS = 2
"""The most tries to give ping the same part of every rank's work. A further try aims at a smaller part."""
_FEW = 0.1
"""The part of all ranks that may have too little work in ping without a further try."""

Ranges = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""[N] document, start, stop and rank of query ranges [start, stop), all int64."""


def ranges_of_shares(
    document: np.ndarray, rank: np.ndarray, low: np.ndarray, high: np.ndarray, first: np.ndarray, last: np.ndarray
) -> Ranges:
    """Returns the query ranges of shares in the rows [first, last) of each document.

    A share is a range in the first half of these rows, and its mirror image in the second half. Positions run from 0 at
    the outer ends to 1 in the middle. Example: of the rows [0, 8), the share [0, 0.25) is [0, 1) and [7, 8), and the
    share [0.25, 1) is [1, 7).

    Args:
        document, rank: [S] document and rank of each share.
        low, high: [S] positions where each share begins and ends.
        first, last: [D] first row of each document's head or tail, and one past the last row.
    """
    # "outer" and "inner" are begin and end of a share, counted in rows from the outer ends. A share that ends at 1 is
    # one range across the middle.
    first, last = first[document], last[document]
    half = (last - first) // 2
    outer, inner = (low * half).astype(np.int64), (high * half).astype(np.int64)
    middle = (high == 1) & (low < 1)
    start = np.concatenate((first + outer, last - inner))
    stop = np.concatenate((np.where(middle, last - outer, first + inner), last - outer))
    some = np.concatenate((np.ones(len(middle), bool), ~middle)) & (stop > start)
    return np.tile(document, 2)[some], start[some], stop[some], np.tile(rank, 2)[some]


def bounds_in_nano_batch(nano: int, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the [S] begins and [S] ends of the shares [low, high) in the head (``nano`` 0) or in the tail (1).

    A rank with outer rows of the head gets inner rows of the tail."""
    return (1 - high, 1 - low) if nano else (low, high)


def cut_whole(
    length: np.ndarray, dealt: Dealt, budgets: Sequence[np.ndarray], cut: np.ndarray, whole: np.ndarray, work: Work
) -> None:
    """Writes into ``cut`` the rows in ping of each document that is on one rank.

    Ping gets about the same part of every rank's work, as far as budgets allow.

    Args:
        length: [D] tokens.
        dealt: which documents are on which ranks.
        budgets: [R] tokens of each rank in ping, and [R] in pong.
        cut: [D] rows of each document in ping; set already for documents on several ranks.
        whole: [S] bool, the shares that are whole documents.
    """
    # In ping and in pong, documents on several ranks leave "room" [R] tokens. "more" [R] is the work of documents on
    # several ranks, and of filler if it took all of the room.
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
    # If documents on several ranks exceed a rank's budget, the room is 0. ``home_rows.py`` moves the excess later.
    room = [np.maximum(each, 0.0) for each in room]
    spaces, level = [each.tolist() for each in room], dealt.split.ping
    for _ in range(_LEVELLINGS):
        # "level" is the part of each rank's work that should be in ping. "wanted" [R] is the surplus that ping should
        # get from documents on one rank.
        wanted = level * total - more[0]
        found: list[int] = []
        off = np.zeros(ranks)
        for rank, (begin, end) in enumerate(pairwise(bounds)):
            if begin < end:
                rows, surpluses, squares, slopes = (column[begin:end] for column in columns)
                there = _OnRank(rows, surpluses, squares, slopes, spaces[0][rank], spaces[1][rank])
                cuts, off[rank] = there.cuts(float(wanted[rank]))
                found += cuts
        head = np.array(found, np.int64)
        again = np.flatnonzero(off[owner] > 0)
        if len(again):
            # These ranks need more than one cut. "heads" cuts all documents of a rank at one row number, or at one part
            # of their rows. A rank takes these heads if they bring ping's surplus nearer to the wanted surplus.
            heads = documents.take(again).heads(wanted, *room)
            nearer = np.abs(wanted - documents.take(again).surplus_of(heads, ranks)) < off
            head[again] = np.where(nearer[owner[again]], heads, head[again])
        cut[document] = head
        reached = (more[0] + documents.surplus_of(head, ranks)) / np.maximum(total, 1e-300)
        # The next try wants a level that all ranks but the part ``_FEW`` reached.
        lowest = float(np.quantile(reached, _FEW))
        if lowest > level * (1 - _NEARLY):
            break
        level = lowest


def _growth(length: np.ndarray, whole: np.ndarray, work: Work) -> tuple[np.ndarray, np.ndarray]:
    """Returns [N] ``square`` and [N] ``slope``. A head with the part p of a document's rows has the work square · p² +
    slope · rows · p. ``whole`` [N] is the work of whole documents."""
    half = length // 2
    part = np.maximum(half / length, 1e-9)
    # whole = square + slope * rows, and the work of the first half = square * part² + slope * rows * part.
    slope = (work(np.zeros_like(half), half) - whole * part**2) / (length * np.maximum(part - part**2, 1e-9))
    slope = np.where(length > 1, slope, 0.0)
    return whole - slope * length, slope


class _OnRank(NamedTuple):
    """The documents that are only on this rank, longest first.

    Attributes:
        rows: [W] tokens.
        surplus: [W] surplus of whole documents.
        square, slope: [W]. A head of h rows has the surplus square · (h / rows)² + slope · h.
        ping, pong: tokens for which ping and pong have room.
    """

    rows: list[int]
    surplus: list[float]
    square: list[float]
    slope: list[float]
    ping: float
    pong: float

    def cuts(self, wanted: float) -> tuple[list[int], float]:
        """Returns [W] rows of each document in ping, and by how much ping misses the ``wanted`` surplus.

        A miss of at most ``_CLOSE`` counts as 0. The miss is infinite if a document fits neither into ping nor into
        pong."""
        # A document goes to ping or pong, whichever misses more surplus, if there is room. Then one document is cut.
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
        # If ping misses surplus, the head of a document of pong goes to ping, else the tail of a document of ping goes
        # to pong. The shortest document with enough surplus is cut.
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
    """All documents that are on one rank each, sorted by rank.

    Attributes:
        rank: [N] rank.
        rows: [N] tokens.
        square, slope: [N] float64. A head of h rows has the surplus square · (h / rows)² + slope · h.
        dense: [N] ``square`` / ``rows``².
    """

    rank: np.ndarray
    rows: np.ndarray
    square: np.ndarray
    slope: np.ndarray
    dense: np.ndarray

    def take(self, chosen: np.ndarray) -> _Documents:
        return _Documents(*(column[chosen] for column in self))

    def surplus_of(self, heads: np.ndarray, ranks: int) -> np.ndarray:
        """Returns [R] surplus of each rank in ping, if documents have heads of ``heads`` [N] rows."""
        return np.bincount(self.rank, (self.dense * heads + self.slope) * heads, ranks)

    def heads(self, wanted: np.ndarray, ping: np.ndarray, pong: np.ndarray) -> np.ndarray:
        """Returns [N] rows of every document's head, so that ranks have ``wanted`` [R] surplus in ping.

        Ping has room for ``ping`` [R] rows, and pong for ``pong`` [R] rows. A rank's heads end at the same row number.
        If ping then has too little work, heads are the same part of each document."""
        # A bisection, on all ranks at once, finds the row number at which a rank's heads end: the last for which ping
        # has room, or an earlier one if ping then has the wanted surplus and pong has room for the tails.
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
        # A rank without spare room or without documents has no choice.
        enough |= (total - pong >= ping) | (total == 0)
        heads = np.minimum(low[at].astype(np.int64), own)
        for rank in np.flatnonzero(~enough).tolist():
            here = slice(*np.searchsorted(at, (rank, rank + 1)).tolist())
            slope = float((self.slope[here] * own[here]).sum())
            part = _head_with(float(wanted[rank]), 1.0, float(self.square[here].sum()), slope)
            part = min(max(part, 1 - pong[rank] / total[rank]), ping[rank] / total[rank], 1.0)
            heads[here] = part * own[here]
        # Heads were rounded down, so pong may have too many rows. The excess "over" goes to ping, document by document.
        # "spare" is a document's rows in pong. "before" is the spare rows of earlier documents on the rank.
        over = total - np.bincount(at, heads, ranks) - np.floor(pong)
        spare = own - heads
        before = np.cumsum(spare) - spare
        before -= before[np.searchsorted(at, at)]
        return heads + np.clip(over[at] - before, 0, spare).astype(np.int64)


def _head_with(surplus: float, rows: float, square: float, slope: float) -> float:
    """Returns the number h of rows, from 0 to ``rows``, for which square · (h / rows)² + slope · h = surplus."""
    dense = max(square, 1e-12) / rows**2
    return float(min(max((-slope + (slope**2 + 4 * dense * max(surplus, 0.0)) ** 0.5) / (2 * dense), 0.0), rows))
