"""Dealing items of many sizes to bins: each bin gets the same work, none more tokens than it has room for.

Placement deals documents with it, to nodes and then to the ranks of each node. Work is in units of the mean rank's.

The *filler* is what comes after the items that are dealt here: the short documents that are laid into whatever room is
left. The *surplus* of an item is its work, less the work of as many tokens of filler. A bin's surplus decides, not its
work: whatever room an item does not take will be filled, and filler brings work too. Example: with filler of 0.1 work
per 1,000 tokens, an item of 2,000 tokens and 0.5 work has a surplus of 0.3.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_DENSE = 0.6
"""The work per token, over the mean, below which an item counts as sparse. Ranks that have enough work are filled up
with sparse ones. With 0.4 or 0.8 bytes change by 1 % (benchmarks/results/planner.md, as of all constants here)."""
_SAME_SIZE = 1.5
"""The ratio of rows within which items are dealt together. They are compared with the same rate of filler, so that bins
are sorted once for all of them."""
OVERFULL = 0.012
"""The work above its goal that a rank may get so that an item stays whole, in parts of the mean rank's work. Beyond it
the item is cut into shares. It is about what the scheduler tolerates anyway."""
_OVERFULL_WITH_KEYS = 0.09
"""The same limit for the last share of a document with more keys than a rank has tokens. A further rank would read all
these keys for this little work (benchmarks/results/planner.md)."""
_LEVELLINGS = 3
"""Rounds in which shares are resized. Each rank's change disturbs the others that share the document, less every time:
without a round bytes grow by 1.2 %, with one by 0.1 %, with more than two they stay the same."""
_NO_SURPLUS = 1e-6
"""The part of an item's work below which its surplus is rounding, and its shares cannot level anything."""
_FEW_SHARES = 1.1
"""The length of a document in shares, over a rank's tokens, up to which it begins where the document before left room.
Longer ones begin on an empty rank, and their leftovers go to shorter documents, which have fewer keys."""
LEAST_SHARE, _LEAST_ROWS = 0.05, 0.2
"""The least work of a share, in parts of the mean rank's work. Where tokens are scarce, a share may be as small as the
second part of that. Smaller shares would cost more in keys that are read again than they level."""


@dataclass(frozen=True)
class Items:
    """The items that are dealt, longest document first. Array legend: I items.

    Attributes:
        rows: [I] tokens.
        work: [I] float64.
        added: [I] float64 work that each share has beyond its part of the item's work.
        long: [I] bool, whether the item is to be cut into shares.
        keys: [I] tokens of the document that the item is, or is a part of.
    """

    rows: np.ndarray
    work: np.ndarray
    added: np.ndarray
    long: np.ndarray
    keys: np.ndarray

    def of(self, item: np.ndarray, part: np.ndarray) -> Items:
        """Returns [N] parts of items as items of their own: the ``part`` of each ``item``."""
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
        parts: the parts that were dealt.
        mean: [B] float64 work that a rank of the bin should get.
        need: [B] float64 work that each bin still lacks; negative where it has too much.
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
    in_turn: bool = False,
) -> tuple[Filled, list[tuple[int, float]]]:
    """Deal items to bins: each to the bin that lacks most surplus and has the tokens, or in parts to several.

    Args:
        items: longest first.
        mean: work that each rank should get.
        room: tokens that each bin has room for.
        ranks: number of ranks that each bin stands for.
        filler: work per token, and tokens, of the short documents that come after these items.
        most: most work of shares on a rank, in parts of the mean, and most rows of them, in parts of its tokens.
        in_turn: whether a document in few shares begins where the one before left room, and slivers of long ones are
            avoided.

    Returns:
        The bins; and (item, part of it) of everything that found no room.
    """
    rates = Rates(items.rows, items.work, filler)
    bins = _Bins(mean, room, ranks, rates.sparse, most, in_turn)
    missed: list[tuple[int, float]] = []
    rows, work, added, long = (x.tolist() for x in (items.rows, items.work, items.added, items.long))
    keys = items.keys.tolist()
    small = (~items.long & (items.work <= bins.least)).tolist()
    begin, most_rows = 0, _FEW_SHARES * max(room)
    # Items [begin, end) of about one size are dealt against the filler that begins at ``end``. Small ones are put whole
    # into the neediest bin, quickly. Any other one is put whole, or cut: first into what bins lack, then, where all
    # have enough work, into whatever tokens are left.
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

    Whole documents were dealt after the shares, so ranks with shares may lack work by now, or have too much. Each
    round gives every rank what it lacks. Then the shares of a document are scaled so that they add up as before.

    Args:
        items: all items.
        filled: the bins with the parts that were dealt.
        rate: work per token of the filler.
    """
    # An item without surplus brings no more work than the filler, so that resizing its shares would level nothing.
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
        # Per share: its surplus, and its rows. A rank's shares all grow by the factor that covers what it lacks, and by
        # no more than its space allows. "whole" is what the shares of one document add up to.
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
        room: [B] tokens that each bin has room for.
        ranks: [B] number of ranks that each bin stands for.
        sparse: work per token of the sparsest documents.
        most: most work of shares on a rank, in parts of the mean, and most rows of them, in parts of its tokens.
        in_turn: whether the bin with the newest share is set aside until :meth:`take_back`.

    Attributes:
        least: least work of a share.
        many_keys: whether the item being cut has so many keys that no rank should read them for little work.
    """

    def __init__(
        self, mean: float, room: list[int], ranks: list[int], sparse: float, most: tuple[float, float], in_turn: bool
    ) -> None:
        most_work, most_rows = most
        self._dealt: tuple[list[int], list[int], list[float]] = [], [], []
        self._need, self._space, self._sparse = [mean * each for each in ranks], [float(each) for each in room], sparse
        # The rows that shares leave free are filled with the sparsest documents, which bring some of the work.
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
        """Sorts bins by the surplus that they lack, most first, where filler has ``rate`` work per token.

        A bin lacks its missing work, less what filler will bring into all of its room."""
        self._rate, self._newest = rate, -1
        pairs = zip(self._need, self._space, strict=True)
        self._heap = [(rate * tokens - lacks, at) for at, (lacks, tokens) in enumerate(pairs)]
        self._full = []
        heapq.heapify(self._heap)

    def put_small(self, rows: list[float], work: list[float], small: list[bool], first: int, end: int) -> int:
        """Puts whole items, from ``first`` up to ``end``, each into the bin that lacks most surplus then.

        It goes on while items are ``small``, too small ever to be cut, and that bin has the tokens. Returns the first
        item that was not put."""
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
        """Puts a whole item into the neediest bin that has the tokens; returns whether it did.

        It does not where the bin would get more than ``OVERFULL`` too much, unless the excess is too small for a
        share."""
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
            # A bin with room for less than one token is out of this round: only parts may still fit.
            if self._space[each[1]] < 1.0:
                self._full.append(each)
            else:
                heapq.heappush(self._heap, each)
        return found

    def take_back(self, *, first: bool = False) -> None:
        """Puts the bin with the newest share back among the others; in front, with ``first``, if it lacks two more
        shares.

        The next document then begins there. So no bin gets shares of many documents, and reads the keys of each."""
        at, self._newest = self._newest, -1
        if at >= 0:
            first = first and self._need_shares[at] >= 2 * self.least
            heapq.heappush(self._heap, (-float("inf") if first else self._key(at), at))

    def _key(self, at: int) -> float:
        return self._rate * self._space[at] - self._need[at]

    def put_parts(self, item: int, part: float, own: float, brings: float, extra: float, *, within_need: bool) -> float:
        """Puts ``part`` of an item into one bin after the other; returns the part that is left.

        Args:
            item: its number.
            part: how much of it is to be put.
            own: rows of the whole item.
            brings: work of the whole item.
            extra: work that each share has beyond its part.
            within_need: whether a bin gets as much as it lacks, or as much as it has tokens for.
        """
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
                    # The rest must not be a sliver: this bin takes it too, or leaves a whole least share.
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
    """Work per token of the filler, as dealing goes on.

    Attributes:
        of_shorter: [I + 1] number i is the work per token of the items from i on and of the filler together.
        sparse: work per token of the sparse items together; where none is sparse, of the last item and the filler.
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
