"""Deals documents to bins, so that all bins get about equal work and no bin gets more tokens than it has room for.

``shares.py`` calls this to place the documents of a micro-batch on ranks. The bins are ranks. If the ranks are on
several nodes, documents are dealt to nodes first, and a bin is then a node. An *item* is a document, or the part of a
document that a node got. A *long* item has more work or tokens than one rank should get, so it is cut into *shares* for
several bins. Other items are cut only if no bin can take them whole. Work is the time of attention; the mean rank's
work is 1.

The shortest documents, the *filler*, are not dealt here. Filler later fills the tokens that items leave, and brings
work too. So a bin with many tokens left will get work in any case. Items are therefore compared by their *surplus*:
their work minus the work of as many tokens of filler. Example: filler has 0.1 work per 1,000 tokens. Then an item of
2,000 tokens and 0.5 work has a surplus of 0.5 - 0.2 = 0.3.

Array legend: I items, B bins, N parts.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_DENSE = 0.6
"""An item is *sparse* if its work per token is below this multiple of the mean over all items and filler. Sparse items
are expected in the tokens of a rank that shares leave free. Other values: benchmarks/results/planner.md."""
_SAME_SIZE = 1.5
"""Items are dealt in groups of similar length: the longest item of a group has less than this many times the rows of
the shortest. Bins are sorted once for each group, which saves time."""
OVERFULL = 0.012
"""The most work that a rank may get above the work that it should have, so that an item stays whole; the mean rank's
work is 1."""
_OVERFULL_WITH_KEYS = 0.09
"""The limit in place of ``OVERFULL`` for the last share of a very long document (``_FEW_SHARES``), if ranks should read
few keys. It is large, because a further rank would have to read many keys of the document for little work."""
_LEVELLINGS = 3
"""Rounds in which :func:`levelled` resizes shares. The value 0 makes plans move 1.2 % more bytes
(benchmarks/results/planner.md)."""
_NO_SURPLUS = 1e-6
"""Shares of an item are not resized if its surplus is below this part of its work: such a surplus is rounding."""
_FEW_SHARES = 1.1
"""A document is *very long* if it has more than this many times the tokens of the largest bin. Other long documents may
begin on the rank where the long document before ended. So fewer ranks read the keys of several documents."""
LEAST_SHARE = 0.05
"""The least work of a share; the mean rank's work is 1. A smaller share is not worth the keys that its rank must
read."""
_LEAST_ROWS = 0.2
"""The part of ``LEAST_SHARE`` that suffices if a bin has no tokens for a larger share."""


@dataclass(frozen=True)
class Items:
    """Documents, or nodes' parts of documents, longest first.

    Attributes:
        rows: [I] tokens.
        work: [I] float64 work of each item.
        added: [I] float64 work that a cut adds for each share of the item, because every share reads keys again.
        long: [I] bool, whether the item is long.
        keys: [I] tokens of the whole document.
    """

    rows: np.ndarray
    work: np.ndarray
    added: np.ndarray
    long: np.ndarray
    keys: np.ndarray

    def of(self, item: np.ndarray, part: np.ndarray) -> Items:
        """Returns [N] new items: item n is the fraction ``part[n]`` of ``item[n]``."""
        rows, work = self.rows[item] * part, self.work[item] * part
        return Items(rows, work, self.added[item], self.long[item], self.keys[item])

    def between(self, low: int, high: int) -> Items:
        columns = (self.rows, self.work, self.added, self.long, self.keys)
        return Items(*(column[low:high] for column in columns))


class Parts(NamedTuple):
    """The parts of items that bins got, [N] each: index of the item, index of the bin, and fraction of the item."""

    item: np.ndarray
    bin: np.ndarray
    part: np.ndarray


class Filled(NamedTuple):
    """Bins and the parts of items in them.

    Attributes:
        parts: the parts of items.
        mean: [B] float64 work that each rank of a bin should get.
        need: [B] float64 work that each bin still lacks; negative if it has too much.
        space: [B] float64 tokens that each bin still has room for.
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
    few_keys: bool = False,
) -> tuple[Filled, list[tuple[int, float]]]:
    """Deals each item to the bin that lacks most surplus and has the tokens, or in shares to several bins.

    Args:
        items: the items, longest first.
        mean: work that each rank should get.
        room: [B] tokens that each bin has room for.
        ranks: [B] number of ranks that each bin stands for.
        filler: work per token of the filler, and the number of its tokens.
        most: limits on all shares of a rank together: their work over the mean work, and their rows over the rank's
            tokens.
        few_keys: whether ranks should read the keys of few documents. A long document may then begin on the bin where
            the long document before ended (``_FEW_SHARES``). Very long documents then have no small last share
            (``_OVERFULL_WITH_KEYS``).

    Returns:
        The bins; and (item, fraction of the item) for each item, or rest of an item, that found no room.
    """
    rates = Rates(items.rows, items.work, filler)
    bins = _Bins(mean, room, ranks, rates.sparse, most, few_keys)
    missed: list[tuple[int, float]] = []
    rows, work, added, long = (x.tolist() for x in (items.rows, items.work, items.added, items.long))
    keys = items.keys.tolist()
    small = (~items.long & (items.work <= bins.least)).tolist()
    begin, most_rows = 0, _FEW_SHARES * max(room)
    # Items [begin, end) are one group of similar length. While a group is dealt, all shorter items count as filler.
    # Small items are put whole, in one quick loop. A larger item is put whole if it is not long and a bin can take it.
    # Other items are cut. Bins first get at most the work that they lack. What is left of an item then goes wherever
    # there are tokens.
    while begin < len(rows):
        end = begin + 1
        while end < len(rows) and rows[end] * _SAME_SIZE > rows[begin]:
            end += 1
        bins.order_by(rates.of_shorter[end])
        item = begin - 1
        while (item := bins.put_small(rows, work, small, item + 1, end)) < end:
            own, brings, extra, part = rows[item], work[item], added[item], 1.0
            if long[item]:
                bins.very_long = few_keys and keys[item] > most_rows
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
    """Returns the dealt parts, with shares of long items resized so that ranks have more equal work.

    Shares were dealt before shorter items, so a rank with shares may now have too little or too much work. Each round
    first scales all shares of a rank by one factor, with which the rank would have the work that it should have. Then
    it scales all shares of an item by one factor, with which their sum is what it was. ``rate`` is the filler's work
    per token.
    """
    resizable = items.long & (items.work - rate * items.rows > _NO_SURPLUS * items.work)
    in_shares = np.flatnonzero((filled.parts.part < 1) & resizable[filled.parts.item])
    if not len(in_shares):
        return filled.parts
    in_shares = in_shares[filled.parts.item[in_shares].argsort(kind="stable")]
    item, at, part = (column[in_shares] for column in filled.parts)
    firsts = np.flatnonzero(np.append(True, item[1:] != item[:-1]))
    count = np.diff(np.append(firsts, len(item)))
    whole = np.repeat(np.add.reduceat(part, firsts), count)
    rows, work = items.rows[item], items.work[item]
    surplus, need, space = work - rate * rows, filled.need.copy(), filled.space.copy()
    tiny = np.maximum(1e-6 * (LEAST_SHARE * filled.mean), 1e-300)
    for _ in range(_LEVELLINGS):
        # "size" is the surplus of each share and "own" its rows. With the surplus "wanted" the rank would lack none,
        # and with the surplus "most" it would have no tokens left. "whole" is the sum of an item's shares.
        size, own = part * surplus, part * rows
        lacks = need - rate * space
        wanted = size * (1 + (lacks / np.maximum(np.bincount(at, size, len(space)), tiny))[at])
        most = size * (1 + (np.maximum(space, 0.0) / np.maximum(np.bincount(at, own, len(space)), tiny))[at])
        resized = np.minimum(np.maximum(wanted, 0.0), most) / surplus
        resized *= whole / np.maximum(np.repeat(np.add.reduceat(resized, firsts), count), 1e-300)
        need -= np.bincount(at, (resized - part) * work, len(space))
        space -= np.bincount(at, (resized - part) * rows, len(space))
        part = resized
    parts = filled.parts.part.copy()
    parts[in_shares] = part
    return filled.parts._replace(part=parts)


class _Bins:
    """The bins while items are dealt: a heap with the bin that lacks most surplus on top.

    Arguments are those of :func:`deal_to_bins`, and ``sparse``, the work per token of sparse items (:class:`Rates`).
    With ``few_keys`` the bin with the newest share is not in the heap until :meth:`take_back` puts it there.

    Attributes:
        least: least work of a share.
        very_long: whether the item that is being cut is very long, and ranks should read few keys.
    """

    def __init__(
        self, mean: float, room: list[int], ranks: list[int], sparse: float, most: tuple[float, float], few_keys: bool
    ) -> None:
        most_work, most_rows = most
        self._dealt: tuple[list[int], list[int], list[float]] = [], [], []
        self._need, self._space, self._sparse = [mean * each for each in ranks], [float(each) for each in room], sparse
        # Shares may take at most "most_rows" of a bin's tokens. Sparse documents will fill the other tokens, so their
        # work is subtracted from the work that shares may have.
        self._need_shares = [
            most_work * lacks - sparse * (1 - most_rows) * tokens
            for lacks, tokens in zip(self._need, self._space, strict=True)
        ]
        self._space_shares = [most_rows * tokens for tokens in self._space]
        self._over, self.least = OVERFULL * mean * min(ranks), LEAST_SHARE * mean
        self.very_long = False
        self._mean, self._rate = mean, 0.0
        self._few_keys, self._newest = few_keys, -1
        self._heap: list[tuple[float, int]] = []
        self._full: list[tuple[float, int]] = []

    @property
    def filled(self) -> Filled:
        item, at, part = self._dealt
        parts = Parts(np.array(item, np.int64), np.array(at, np.int64), np.array(part, np.float64))
        return Filled(parts, np.full(len(self._need), self._mean), np.array(self._need), np.array(self._space))

    def order_by(self, rate: float) -> None:
        """Sorts the bins by the surplus that they lack, most first, for filler with ``rate`` work per token.

        The surplus that a bin lacks is the work that it lacks, minus the work of filler in all of its room."""
        self._rate, self._newest = rate, -1
        pairs = zip(self._need, self._space, strict=True)
        self._heap = [(rate * tokens - lacks, at) for at, (lacks, tokens) in enumerate(pairs)]
        self._full = []
        heapq.heapify(self._heap)

    def put_small(self, rows: list[float], work: list[float], small: list[bool], first: int, end: int) -> int:
        """Puts whole items from index ``first`` up to ``end``, each into the bin that lacks most surplus at that time.

        Returns the index of the first item that is not ``small`` or does not fit into its bin; ``end`` if all were
        put."""
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
        """Puts a whole item of ``own`` rows into the bin that lacks most surplus among those with enough tokens.

        Returns whether the item was put. The bin may get at most ``OVERFULL`` more work than it should have. This limit
        does not hold if the item's work ``brings``, or the part of this work that fits, is less than a least share.
        """
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
            # A bin without room for one token stays out of the heap until the next item is cut.
            if self._space[each[1]] < 1.0:
                self._full.append(each)
            else:
                heapq.heappush(self._heap, each)
        return found

    def take_back(self, *, first: bool = False) -> None:
        """Puts the bin with the newest share back into the heap.

        With ``first``, the bin goes on top if it still lacks the work of two least shares. The next document then
        begins there."""
        at, self._newest = self._newest, -1
        if at >= 0:
            first = first and self._need_shares[at] >= 2 * self.least
            heapq.heappush(self._heap, (-float("inf") if first else self._key(at), at))

    def _key(self, at: int) -> float:
        return self._rate * self._space[at] - self._need[at]

    def put_parts(self, item: int, part: float, own: float, brings: float, extra: float, *, within_need: bool) -> float:
        """Puts the fraction ``part`` of an item into bins, one bin after the other. Returns the fraction without room.

        The whole item has ``own`` rows and ``brings`` work; a cut adds ``extra`` work for each share. With
        ``within_need`` bins get at most the work that they lack; otherwise only their tokens limit them.
        """
        aside = []
        while self._full:
            heapq.heappush(self._heap, self._full.pop())
        most = brings - self._sparse * own
        over = max(self._over, _OVERFULL_WITH_KEYS * self._mean) if self.very_long else self._over
        least = min(self.least / max(brings, 1e-12), 1.0)
        while self._heap and part > 0:
            at = self._heap[0][1]
            taken = part
            if within_need:
                lacks = min(self._need[at] - self._sparse * self._space[at], self._need_shares[at])
                space = min(self._space[at], self._space_shares[at])
                if most * part > lacks + over or own * part > space:
                    taken = min((lacks - extra) / most if most > 0 else part, space / own)
                    # The rest must be a least share or more. If it is less, this bin takes the rest too, or it takes
                    # less and leaves a least share.
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
        """Notes that the bin ``at``, on top of the heap, got a part of an item, and moves the bin to its new place.

        The whole item has ``own`` rows, and the part brings ``work``. With ``shares`` the part counts against the
        limits on shares.
        """
        self._need[at] -= work
        self._space[at] -= part * own
        if shares:
            self._need_shares[at] -= work - self._sparse * part * own
            self._space_shares[at] -= part * own
        if shares and self._few_keys:
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
    """Work per token of items and filler that are still to be dealt.

    Attributes:
        of_shorter: [I + 1] element i is the work per token of the items from i on and the filler together.
        sparse: work per token of all sparse items (``_DENSE``) together, and of the filler if it is sparse. If nothing
            is sparse, the work per token of the shortest item and the filler together.
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
