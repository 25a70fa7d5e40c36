"""Deals documents to bins: all ranks get about equal work, and no bin gets more tokens than it has room for.

``shares.py`` calls :func:`deal_to_bins`, and then :func:`levelled`. A bin is a rank. With several nodes, documents are
first dealt to bins that are nodes, and then, inside each node, to bins that are ranks.

- *Work* is the time of attention. Its unit is the mean work of a rank before documents are cut.
- *Free* tokens are the tokens that a bin still has room for.
- An *item* is a document, or the part of a document that a node got.
- A *long* item has more work or tokens than one rank should get. It may be cut into *shares* for several bins.
- *Filler* is the shortest documents. ``home_rows.py`` places it after all items, in the free tokens.
- The *surplus* of an item is its work minus the work of as many tokens of filler. Example: filler has 0.1 work per
  1,000 tokens. An item of 2,000 tokens and 0.5 work has a surplus of 0.5 - 0.2 = 0.3.
- Of the work that a bin lacks, shorter items and filler in its free tokens will bring a part. The rest is the surplus
  that the bin *lacks*. Example: a bin lacks 0.5 work, and its free tokens have room for filler with 0.2 work. Then the
  bin lacks a surplus of 0.3.

Array legend: I items, B bins, N parts of items. Most constants were compared with other values:
``benchmarks/planner_constants.py``.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_DENSE = 0.6
"""An item or filler is *sparse* if its work per token is below this multiple of the mean work per token. Sparse items
are expected to fill the tokens that shares leave free in a bin."""
_SAME_SIZE = 1.5
"""Items are dealt in groups of similar length, so that bins are sorted once for each group. The longest item of a group
has less than this many times the tokens of the shortest."""
OVERFULL = 0.012
"""A bin may exceed the work that it should get by this part of the work that the smallest bin should get. Up to this
limit the bin takes all that is left of an item, so that no further bin gets a share. For an item that is not long
there is no limit in the bin that lacks most surplus. The item goes there whole if that bin has enough free tokens."""
_OVERFULL_WITH_KEYS = 0.09
"""Replaces ``OVERFULL`` for the last share of a very long document (``_FEW_SHARES``), if :func:`deal_to_bins` gets
``few_keys``. With a smaller limit, one more rank would read all keys of the document for little work."""
_LEVELLINGS = 3
"""Rounds in which :func:`levelled` resizes shares. Without these rounds plans move 1.2 % more bytes."""
_NO_SURPLUS = 1e-6
"""A surplus up to this part of an item's work is taken for a rounding error. The item's shares then keep their size."""
_FEW_SHARES = 1.1
"""A document is *very long* if it has more than this many times the tokens of the largest bin."""
LEAST_SHARE = 0.05
"""The least work of a share, as a part of a rank's mean work. A smaller share is not worth the keys that its rank must
read."""
_LEAST_ROWS = 0.2
"""A share may have as little as this part of ``LEAST_SHARE``, if its bin has no free tokens for more."""


@dataclass(frozen=True)
class Items:
    """Documents, or nodes' parts of documents, longest first.

    Attributes:
        rows: [I] tokens.
        work: [I] float64 work.
        added: [I] float64 work that each share of a cut item has in addition, because it reads keys again.
        long: [I] bool.
        keys: [I] tokens of the whole document.
    """

    rows: np.ndarray
    work: np.ndarray
    added: np.ndarray
    long: np.ndarray
    keys: np.ndarray

    def of(self, item: np.ndarray, part: np.ndarray) -> Items:
        """Returns [N] items; the n-th is the fraction part[n] of the old item item[n]."""
        rows, work = self.rows[item] * part, self.work[item] * part
        return Items(rows, work, self.added[item], self.long[item], self.keys[item])

    def between(self, low: int, high: int) -> Items:
        columns = (self.rows, self.work, self.added, self.long, self.keys)
        return Items(*(column[low:high] for column in columns))


class Parts(NamedTuple):
    """The parts of items that bins got: [N] indices of items, indices of bins, and fractions of the items."""

    item: np.ndarray
    bin: np.ndarray
    part: np.ndarray


class Filled(NamedTuple):
    """Bins and the parts of items in them.

    Attributes:
        mean: [B] float64 work that each rank of a bin should get.
        need: [B] float64 work that each bin still lacks; negative if it has too much.
        space: [B] float64 free tokens of each bin.
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
    """Deals items to bins, longest first, each to the bin that lacks most surplus and has room.

    A long item may be cut into shares. Any other item is cut only if its bin has too few free tokens.

    Args:
        mean: work that each rank should get, about 1.
        room: [B] tokens that each bin has room for.
        ranks: [B] number of ranks in each bin.
        filler: work per token of the filler, and the number of its tokens.
        most: the parts of a bin's work and of its tokens that shares should take at most. With (0.8, 0.5), a bin of 1.0
            work and 100 tokens takes shares of 0.8 work and 50 tokens. It takes more only of the rest of an item for
            which no bin has room within these limits.
        few_keys: whether each rank should read the keys of few documents. A very long document (``_FEW_SHARES``) then
            has no small last share. If two long documents follow each other and neither is very long, the second may
            begin in the bin where the first ended.

    Returns:
        The bins; and (item, fraction of the item) for everything that found no room.
    """
    rates = Rates(items.rows, items.work, filler)
    bins = _Bins(mean, room, ranks, rates.sparse, most, few_keys)
    missed: list[tuple[int, float]] = []
    rows, work, added, long = (x.tolist() for x in (items.rows, items.work, items.added, items.long))
    keys = items.keys.tolist()
    small = (~items.long & (items.work <= bins.least)).tolist()
    begin, most_rows = 0, _FEW_SHARES * max(room)
    # Items [begin, end) are one group (``_SAME_SIZE``). Of a long item, bins first get about the work that they lack.
    # The rest of the item goes to bins with free tokens.
    while begin < len(rows):
        end = begin + 1
        while end < len(rows) and rows[end] * _SAME_SIZE > rows[begin]:
            end += 1
        bins.order_by(rates.of_shorter[end])
        item = begin - 1
        while (item := bins.put_small(rows, work, small, item + 1, end)) < end:
            part = 1.0
            if long[item]:
                bins.very_long = few_keys and keys[item] > most_rows
                part = bins.put_parts(item, part, rows[item], work[item], added[item], within_need=True)
                next_may_join = item + 1 < end and long[item + 1] and max(keys[item], keys[item + 1]) <= most_rows
                bins.take_back(first=next_may_join and part <= 0)
            elif bins.put_whole(item, rows[item], work[item]):
                continue
            if part > 0:
                part = bins.put_parts(item, part, rows[item], work[item], added[item], within_need=False)
            if part > 0:
                missed.append((item, part))
        begin = end
    return bins.filled, missed


def levelled(items: Items, filled: Filled, rate: float) -> Parts:
    """Returns the dealt parts, after shares of long items were resized so that ranks have more equal work.

    In each round, all shares of a rank are scaled so that the rank gets the work that it should have. Free tokens limit
    this. Then all shares of an item are scaled so that their sum is what it was.

    Args:
        filled: the bins, which must be ranks.
        rate: the filler's work per token.
    """
    resizable = items.long & (items.work - rate * items.rows > _NO_SURPLUS * items.work)
    in_shares = np.flatnonzero((filled.parts.part < 1) & resizable[filled.parts.item])
    if not len(in_shares):
        return filled.parts
    # Shares are sorted by item. For each item, "firsts" is the index of its first share, and "count" is its number of
    # shares. For each share, "whole" is the sum of its item's shares.
    in_shares = in_shares[filled.parts.item[in_shares].argsort(kind="stable")]
    item, at, part = (column[in_shares] for column in filled.parts)
    firsts = np.flatnonzero(np.append(True, item[1:] != item[:-1]))
    count = np.diff(np.append(firsts, len(item)))
    whole = np.repeat(np.add.reduceat(part, firsts), count)
    rows, work = items.rows[item], items.work[item]
    surplus, need, space = work - rate * rows, filled.need.copy(), filled.space.copy()
    tiny = np.maximum(1e-6 * (LEAST_SHARE * filled.mean), 1e-300)
    for _ in range(_LEVELLINGS):
        # "has" is the surplus of each share. If all shares of a rank had the surplus "wanted", the rank would lack no
        # surplus. If they had the surplus "most", the rank would have no free tokens.
        has, tokens = part * surplus, part * rows
        lacks = need - rate * space
        wanted = has * (1 + (lacks / np.maximum(np.bincount(at, has, len(space)), tiny))[at])
        most = has * (1 + (np.maximum(space, 0.0) / np.maximum(np.bincount(at, tokens, len(space)), tiny))[at])
        resized = np.minimum(np.maximum(wanted, 0.0), most) / surplus
        resized *= whole / np.maximum(np.repeat(np.add.reduceat(resized, firsts), count), 1e-300)
        need -= np.bincount(at, (resized - part) * work, len(space))
        space -= np.bincount(at, (resized - part) * rows, len(space))
        part = resized
    parts = filled.parts.part.copy()
    parts[in_shares] = part
    return filled.parts._replace(part=parts)


class _Bins:
    """All bins while items are dealt: a heap with the bin that lacks most surplus on top.

    ``sparse`` is the work per token of sparse items. Other arguments are those of :func:`deal_to_bins`. Methods get an
    item's index, and the ``rows`` and ``work`` of the whole item. With ``few_keys`` the bin with the newest share stays
    outside the heap until :meth:`take_back` is called, so that no other share goes there.
    """

    def __init__(
        self, mean: float, room: list[int], ranks: list[int], sparse: float, most: tuple[float, float], few_keys: bool
    ) -> None:
        most_work, most_rows = most
        self._dealt: tuple[list[int], list[int], list[float]] = [], [], []
        self._need, self._space, self._sparse = [mean * each for each in ranks], [float(each) for each in room], sparse
        # Sparse items will fill the tokens that shares leave free. So the work of these items is subtracted from the
        # work that shares may have. If ``most_rows`` is 0.5, shares may take half of the tokens. Here the work of
        # sparse items in all of that half is subtracted, and :meth:`_put` adds it back for the tokens of each share.
        # If ``most_rows`` is 1, nothing is subtracted here: :meth:`put_parts` does it.
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
        """Sorts the bins by the surplus that they lack; items still to come and filler have ``rate`` work per token."""
        self._rate, self._newest = rate, -1
        pairs = zip(self._need, self._space, strict=True)
        self._heap = [(rate * tokens - lacks, at) for at, (lacks, tokens) in enumerate(pairs)]
        self._full = []
        heapq.heapify(self._heap)

    def put_small(self, rows: list[float], work: list[float], small: list[bool], first: int, end: int) -> int:
        """Puts the items from ``first`` up to ``end`` whole, each into the bin that lacks most surplus.

        An item is *small* if it is not long and its work is at most that of a least share (``LEAST_SHARE``).

        Returns the index of the first item that is not small or does not fit into that bin; else ``end``."""
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

    def put_whole(self, item: int, rows: float, work: float) -> bool:
        """Puts an item whole into the bin that lacks most surplus among those with enough free tokens.

        Returns False if there is no such bin, or if the bin would get too much work (``OVERFULL``). Too much work is
        accepted if the item has at most a least share's work, or if the bin lacks less than that.

        After False the caller calls :meth:`put_parts`, which begins with the bin that lacks most surplus. If that bin
        has enough free tokens, it gets the whole item all the same. Otherwise the item is cut, so that no bin far
        exceeds its work."""
        aside = []
        while self._heap and self._space[self._heap[0][1]] < rows:
            aside.append(heapq.heappop(self._heap))
        found = bool(self._heap)
        if found:
            at = self._heap[0][1]
            # "over" is the work beyond what the bin should get, if sparse items then fill its free tokens.
            over = work - self._sparse * rows - (self._need[at] - self._sparse * self._space[at])
            found = work <= self.least or over <= self._over or work - over < self.least
            if found:
                self._put(item, at, 1.0, rows, work)
        for each in aside:
            if self._space[each[1]] < 1.0:  # such a bin stays out of the heap until the next cut
                self._full.append(each)
            else:
                heapq.heappush(self._heap, each)
        return found

    def take_back(self, *, first: bool = False) -> None:
        """Puts the bin with the newest share back into the heap.

        With ``first``, the next long item begins in this bin, if shares may still add twice the least share to it."""
        at, self._newest = self._newest, -1
        if at >= 0:
            first = first and self._need_shares[at] >= 2 * self.least
            heapq.heappush(self._heap, (-float("inf") if first else self._key(at), at))

    def _key(self, at: int) -> float:
        return self._rate * self._space[at] - self._need[at]

    def put_parts(self, item: int, part: float, rows: float, work: float, added: float, *, within_need: bool) -> float:
        """Puts the fraction ``part`` of an item into one or several bins; returns the fraction that found no room.

        With ``within_need`` a bin gets about the work that it lacks; otherwise only its free tokens limit the share."""
        aside = []
        while self._full:
            heapq.heappush(self._heap, self._full.pop())
        # "extra" is the item's work minus the work of as many tokens of sparse items.
        extra = work - self._sparse * rows
        over = max(self._over, _OVERFULL_WITH_KEYS * self._mean) if self.very_long else self._over
        least = min(self.least / max(work, 1e-12), 1.0)
        while self._heap and part > 0:
            at = self._heap[0][1]
            taken = part
            if within_need:
                lacks = min(self._need[at] - self._sparse * self._space[at], self._need_shares[at])
                space = min(self._space[at], self._space_shares[at])
                if extra * part > lacks + over or rows * part > space:
                    taken = min((lacks - added) / extra if extra > 0 else part, space / rows)
                    # If less than a least share would be left, this bin takes all, or it takes less so that a least
                    # share is left.
                    if part - taken < least:
                        taken = part if (part - taken) * extra <= over else part - least
                if taken < least and taken < part:
                    taken = 0.0
            if taken * rows > self._space[at]:
                taken = self._space[at] / rows
                if taken < _LEAST_ROWS * least:
                    taken = 0.0
            if taken <= 0:
                aside.append(heapq.heappop(self._heap))
                continue
            self._put(item, at, taken, rows, work * taken + (added if taken < 1 else 0.0), shares=within_need)
            part = part - taken if part - taken > 1e-9 else 0.0
        for _, at in aside:
            heapq.heappush(self._heap, (self._key(at), at))
        return part

    def _put(self, item: int, at: int, part: float, rows: float, gained: float, *, shares: bool = False) -> None:
        """Adds a part of an item, with ``gained`` work, to the bin ``at``, which must be on top of the heap.

        With ``shares`` the part counts against ``most`` of :func:`deal_to_bins`."""
        self._need[at] -= gained
        self._space[at] -= part * rows
        if shares:
            self._need_shares[at] -= gained - self._sparse * part * rows
            self._space_shares[at] -= part * rows
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
    """Work per token of items and filler.

    Attributes:
        of_shorter: [I + 1] element i is the work per token of the filler and all items from i on.
        sparse: work per token of all sparse items and sparse filler (``_DENSE``). If nothing is sparse, the shortest
            item and the filler count as sparse.
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
