"""Dealing items of many sizes to bins: each bin gets the same work, none more tokens than it has room for.

Placement deals documents with it, to nodes and to the ranks of each node. Work is in units of the mean rank's.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_DENSE = 0.6
"""Documents with at least this part of the mean work per token are not needed to fill ranks that have enough work."""
_SAME_SIZE = 1.5
"""Documents within this factor of rows are dealt against the same rate of the shorter documents."""
OVERFULL = 0.012
"""A rank may get so much more than it lacks, of the mean work, rather than a share."""
_OVERFULL_WITH_KEYS = 0.09
"""The same of a document in shares with more keys than a rank has tokens: so much is not worth reading them for."""
_LEVELLINGS = 3
_NO_SURPLUS = 1e-6
"""A surplus below this share of an item's work is rounding. The surplus is its work over that of as many tokens of
what fills ranks up."""
_FEW_SHARES = 1.1
"""Documents in shares of up to so many times a rank's tokens come one after the other. What longer ones leave is for
shorter ones, of which fewer keys are needed."""
LEAST_SHARE, _LEAST_ROWS = 0.05, 0.2
"""Least work of a share, in parts of the mean; and the part of it for which room is used where tokens are scarce."""


@dataclass(frozen=True)
class Items:
    """The items that are dealt, longest document first. Array legend: I items.

    Attributes:
        rows: [I] tokens.
        work: [I] float64.
        added: [I] float64 work that each share has beyond its part.
        long: [I] bool, whether it is to be in shares.
        keys: [I] tokens of the document that it is, or is a part of.
    """

    rows: np.ndarray
    work: np.ndarray
    added: np.ndarray
    long: np.ndarray
    keys: np.ndarray

    def of(self, item: np.ndarray, part: np.ndarray) -> Items:
        """Parts of them."""
        rows, work = self.rows[item] * part, self.work[item] * part
        return Items(rows, work, self.added[item], self.long[item], self.keys[item])

    def between(self, low: int, high: int) -> Items:
        """The items from index ``low`` up to ``high``."""
        columns = (self.rows, self.work, self.added, self.long, self.keys)
        return Items(*(column[low:high] for column in columns))


class Parts(NamedTuple):
    """Parts of items in bins, [N] each: int64 item, int64 bin and float64 part of the item."""

    item: np.ndarray
    bin: np.ndarray
    part: np.ndarray


class Filled(NamedTuple):
    """Bins with what was dealt to them. Array legend: B bins.

    Attributes:
        parts: that were dealt.
        mean: [B] float64 work that a rank of the bin should get.
        need: [B] float64 work that bins still lack.
        space: [B] float64 tokens that they still have.
    """

    parts: Parts
    mean: np.ndarray
    need: np.ndarray
    space: np.ndarray


def deal_to_bins(
    items: Items,
    mean: float,
    room: list[int],
    ranks: list[int],
    filler: tuple[float, int],
    most: tuple[float, float],
    in_turn: bool = False,
) -> tuple[Filled, list[tuple[int, float]]]:
    """Deal items to bins: each to the bin that lacks most surplus and has the tokens, or in parts to several.

    Args:
        items: longest first.
        mean: work that each rank should get.
        room: tokens that each bin has.
        ranks: how many ranks it is.
        filler: work per token, and tokens, of the short documents that come after these items.
        most: work of shares on a rank, in parts of the mean, and rows of them, in parts of its tokens.
        in_turn: whether a document in few shares begins where the one before left room, and slivers of long ones are
            avoided.

    Returns:
        The bins, and (item, part of it) of those without room.
    """
    rates = Rates(items.rows, items.work, filler)
    bins = _Bins(mean, room, ranks, rates.sparse, most, in_turn)
    missed: list[tuple[int, float]] = []
    rows, work, added, long = (x.tolist() for x in (items.rows, items.work, items.added, items.long))
    keys = items.keys.tolist()
    small = (~items.long & (items.work <= bins.least)).tolist()
    begin, most_rows = 0, _FEW_SHARES * max(room)
    while begin < len(rows):
        end = begin + 1
        while end < len(rows) and rows[end] * _SAME_SIZE > rows[begin]:
            end += 1
        bins.order_by(rates.of_shorter[end])
        item = begin - 1
        while (item := bins.put_small(rows, work, small, item + 1, end)) < end:
            own, brings, extra, part = rows[item], work[item], added[item], 1.0
            if long[item]:
                bins.many_keys = in_turn and keys[item] > most_rows
                part = bins.put_parts(item, part, own, brings, extra, within_need=True)
                few = item + 1 < end and long[item + 1] and max(keys[item], keys[item + 1]) <= most_rows
                bins.take_back(first=few and part <= 0)
            elif bins.put_whole(item, own, brings):
                continue
            if part > 0:
                part = bins.put_parts(item, part, own, brings, extra, within_need=False)
            if part > 0:
                missed.append((item, part))
        begin = end
    return bins.filled, missed


def levelled(items: Items, filled: Filled, rate: float) -> Parts:
    """Returns the dealt parts, with the shares of long documents resized.

    Their ranks then get what they lack now that whole documents are there too. ``rate`` is the work per token of what
    fills ranks up."""
    # Who gets more of what brings no more work than what fills ranks up has as much work as before.
    resizable = items.long & (items.work - rate * items.rows > _NO_SURPLUS * items.work)
    in_shares = np.flatnonzero((filled.parts.part < 1) & resizable[filled.parts.item])
    if not len(in_shares):
        return filled.parts
    in_shares = in_shares[filled.parts.item[in_shares].argsort(kind="stable")]
    item, at, part = (column[in_shares] for column in filled.parts)
    heads = np.flatnonzero(np.append(True, item[1:] != item[:-1]))
    count = np.diff(np.append(heads, len(item)))
    whole = np.repeat(np.add.reduceat(part, heads), count)
    rows, work = items.rows[item], items.work[item]
    surplus, need, space = work - rate * rows, filled.need.copy(), filled.space.copy()
    tiny = np.maximum(1e-6 * (LEAST_SHARE * filled.mean), 1e-300)
    for _ in range(_LEVELLINGS):
        # A rank with several shares changes them alike.
        size, own = part * surplus, part * rows
        lacks = need - rate * space
        wanted = size * (1 + (lacks / np.maximum(np.bincount(at, size, len(space)), tiny))[at])
        most = size * (1 + (np.maximum(space, 0.0) / np.maximum(np.bincount(at, own, len(space)), tiny))[at])
        resized = np.minimum(np.maximum(wanted, 0.0), most) / surplus
        resized *= whole / np.maximum(np.repeat(np.add.reduceat(resized, heads), count), 1e-300)
        need -= np.bincount(at, (resized - part) * work, len(space))
        space -= np.bincount(at, (resized - part) * rows, len(space))
        part = resized
    parts = filled.parts.part.copy()
    parts[in_shares] = part
    return filled.parts._replace(part=parts)


class _Bins:
    """Nodes or ranks while they fill up. Array legend: B bins.

    Args:
        mean: work that each rank should get.
        room: [B] tokens.
        ranks: [B] how many ranks it is.
        sparse: work per token of the sparsest documents.
        most: work of shares on a rank, in parts of the mean, and rows of them, in parts of its tokens.
        in_turn: whether the bin with the newest share is set aside until :meth:`take_back`.

    Attributes:
        least: least work of a share.
        many_keys: whether shares are of a document of which no rank should read all keys for little work.
    """

    def __init__(
        self, mean: float, room: list[int], ranks: list[int], sparse: float, most: tuple[float, float], in_turn: bool
    ) -> None:
        most_work, most_rows = most
        self._dealt: tuple[list[int], list[int], list[float]] = [], [], []
        self._need, self._space, self._sparse = [mean * each for each in ranks], [float(each) for each in room], sparse
        # Pong has short documents beside its shares.
        self._need_shares = [
            most_work * lacks - sparse * (1 - most_rows) * tokens
            for lacks, tokens in zip(self._need, self._space, strict=True)
        ]
        self._space_shares = [most_rows * tokens for tokens in self._space]
        self._over, self.least = OVERFULL * mean * min(ranks), LEAST_SHARE * mean
        self.many_keys = False
        self._mean, self._rate = mean, 0.0
        self._in_turn, self._newest = in_turn, -1
        self._heap: list[tuple[float, int]] = []
        self._full: list[tuple[float, int]] = []

    @property
    def filled(self) -> Filled:
        """The bins with all that was put into them so far."""
        item, at, part = self._dealt
        parts = Parts(np.array(item, np.int64), np.array(at, np.int64), np.array(part, np.float64))
        return Filled(parts, np.full(len(self._need), self._mean), np.array(self._need), np.array(self._space))

    def order_by(self, rate: float) -> None:
        """Look first at the bin that lacks most surplus over this work per token."""
        self._rate, self._newest = rate, -1
        pairs = zip(self._need, self._space, strict=True)
        self._heap = [(rate * tokens - lacks, at) for at, (lacks, tokens) in enumerate(pairs)]
        self._full = []
        heapq.heapify(self._heap)

    def put_small(self, rows: list[float], work: list[float], small: list[bool], first: int, end: int) -> int:
        """Put whole items from ``first`` on, up to ``end``, each into the bin that is first then. This goes on while
        items are ``small``, too small ever to be in shares, and that bin has the tokens. Returns the first item that
        was not put."""
        if first == end or not small[first]:
            return first
        heap, need, space, rate, replace_first = self._heap, self._need, self._space, self._rate, heapq.heapreplace
        items, bins, parts = self._dealt
        for item in range(first, end):
            at = heap[0][1]
            left = space[at] - rows[item]
            if left < 0 or not small[item]:
                end = item
                break
            need[at] -= work[item]
            space[at] = left
            replace_first(heap, (rate * left - need[at], at))
            bins.append(at)
        items.extend(range(first, end))
        parts.extend([1.0] * (end - first))
        return end

    def put_whole(self, item: int, own: float, brings: float) -> bool:
        """Put an item into the first bin that has the tokens, if there is one and it does not get far too much."""
        aside = []
        while self._heap and self._space[self._heap[0][1]] < own:
            aside.append(heapq.heappop(self._heap))
        found = bool(self._heap)
        if found:
            at = self._heap[0][1]
            over = brings - self._sparse * own - (self._need[at] - self._sparse * self._space[at])
            found = brings <= self.least or over <= self._over or brings - over < self.least
            if found:
                self._put(item, at, 1.0, own, brings)
        for each in aside:
            # No whole document finds room again where there is less than a token.
            if self._space[each[1]] < 1.0:
                self._full.append(each)
            else:
                heapq.heappush(self._heap, each)
        return found

    def take_back(self, *, first: bool = False) -> None:
        """Let the bin with the newest share get others; look at it ``first`` if it lacks another one: so no bin gets
        shares of many documents, of each of which it needs the keys."""
        at, self._newest = self._newest, -1
        if at >= 0:
            first = first and self._need_shares[at] >= 2 * self.least
            heapq.heappush(self._heap, (-float("inf") if first else self._key(at), at))

    def _key(self, at: int) -> float:
        return self._rate * self._space[at] - self._need[at]

    def put_parts(self, item: int, part: float, own: float, brings: float, extra: float, *, within_need: bool) -> float:
        """Put parts of an item that all of it has ``own`` rows and ``brings`` work into one bin after the other; with
        ``within_need`` as much as they lack, else as much as they have tokens for. Returns what is left of it."""
        aside = []
        while self._full:
            heapq.heappush(self._heap, self._full.pop())
        most = brings - self._sparse * own
        over = max(self._over, _OVERFULL_WITH_KEYS * self._mean) if self.many_keys else self._over
        least = min(self.least / max(brings, 1e-12), 1.0)
        while self._heap and part > 0:
            at = self._heap[0][1]
            taken = part
            if within_need:
                lacks = min(self._need[at] - self._sparse * self._space[at], self._need_shares[at])
                space = min(self._space[at], self._space_shares[at])
                if most * part > lacks + over or own * part > space:
                    taken = min((lacks - extra) / most if most > 0 else part, space / own)
                    # Nobody should get a sliver of the rest.
                    if part - taken < least:
                        taken = part if (part - taken) * most <= over else part - least
                if taken < least and taken < part:
                    taken = 0.0
            if taken * own > self._space[at]:
                taken = self._space[at] / own
                if taken < _LEAST_ROWS * least:
                    taken = 0.0
            if taken <= 0:
                aside.append(heapq.heappop(self._heap))
                continue
            self._put(item, at, taken, own, brings * taken + (extra if taken < 1 else 0.0), shares=within_need)
            part = part - taken if part - taken > 1e-9 else 0.0
        for _, at in aside:
            heapq.heappush(self._heap, (self._key(at), at))
        return part

    def _put(self, item: int, at: int, part: float, own: float, work: float, *, shares: bool = False) -> None:
        self._need[at] -= work
        self._space[at] -= part * own
        if shares:
            self._need_shares[at] -= work - self._sparse * part * own
            self._space_shares[at] -= part * own
        if shares and self._in_turn:
            heapq.heappop(self._heap)
            self.take_back()
            self._newest = at
        else:
            heapq.heapreplace(self._heap, (self._key(at), at))
        items, bins, parts = self._dealt
        items.append(item)
        bins.append(at)
        parts.append(part)


class Rates:
    """Work per token of what fills ranks up.

    Attributes:
        of_shorter: of all items from each on, and one more.
        sparse: of those with little work per token.
    """

    def __init__(self, rows: np.ndarray, work: np.ndarray, filler: tuple[float, int]) -> None:
        own = np.append(rows, float(filler[1]))
        brings = np.append(work, filler[0] * filler[1])
        rows_from, work_from = (np.cumsum(x[::-1])[::-1] for x in (own, brings))
        self.of_shorter: list[float] = (work_from / np.maximum(rows_from, 1.0)).tolist()
        thin = brings < _DENSE * work_from[0] / max(rows_from[0], 1.0) * own
        if not thin.any():
            thin[-2:] = True
        self.sparse = float(brings[thin].sum()) / max(float(own[thin].sum()), 1.0)
