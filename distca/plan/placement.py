"""Placing documents so that most of the work is balanced before anything moves.

The order of documents inside a micro-batch means nothing, so home ranks may be chosen freely as long as each gets its
token budget. A query row that starts life on the rank that computes it never travels; only the k,v rows of the
document before it do. Documents are dealt longest first, to nodes and then to the ranks of each node. One that no rank
has room for is dealt to several ranks in *shares*. A share is a part of the head and the part of the tail that mirrors
it, so that whoever has a tenth of a document has a tenth of its rows, of its work, of its keys read and of its keys
sent: ranks are level in forward and in backward alike, and none sends a long head to all others.

A rank with little room for tokens should get the same work all the same, so what counts for a document is its
*surplus*: its work less what an equal number of tokens of the shorter documents, which fill the rest of the rank, would
bring. The shortest documents are laid into what is left of the budgets, cut where a budget ends.

Both halves of a micro-batch are placed together (``nano_split.py``): where a document lives says nothing about when it
is computed.

Array legend: D documents, R ranks, S shares. Rows are int64. Work is in units of the mean rank's.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from distca.plan.cost.model import CostModel

Placement = Literal["in_order", "spread", "spread_by_half"]
Work = Callable[[np.ndarray, np.ndarray], np.ndarray]

_DENSE = 0.6
"""Documents with at least this part of the mean work per token are not needed to fill ranks that have enough work."""
_SAME_SIZE = 1.5
"""Documents within this factor of rows are dealt against the same rate of the shorter documents."""
_SHORT_DOCUMENTS = 0.03
"""The shortest documents, with this part of all work, are not dealt one by one."""
_PING = 0.25
"""Of the work is for ping where documents are in shares: the heads of half the rows have as much. Less would move fewer
bytes, but leave little attention to hide those of pong behind."""
_LITTLE_PING = 0.06
"""The same where no document in shares has rows in ping."""
_FEW_SHARED, _SPARE, _MOST_ROWS_IN_PONG = 0.01, 1.05, 0.35
"""Work of documents in shares that is too little to care for, the room that ranks should have for shares over what is
needed, and the most rows of documents in shares that are all for pong."""
_OVERFULL = 0.012
"""A rank may get so much more than it lacks, of the mean work, rather than a share."""
_LEVELLINGS = 3
_LEAST_SHARE, _LEAST_ROWS = 0.05, 0.2
"""Least work of a share, in parts of the mean; and the part of it for which room is used where tokens are scarce."""


@dataclass(frozen=True)
class Shares:
    """Which rank has which part of which document. Whole documents are one share from 0 to 1.

    Attributes:
        document: [S].
        rank: [S].
        low: [S] float64 where the share begins, counted from a document's outer rows to its middle ones.
        high: [S] float64 where it ends.
    """

    document: np.ndarray
    rank: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class Halves:
    """How a micro-batch is cut in two.

    Attributes:
        ping: part of every rank's work that is for ping.
        head: part of the rows of a document in shares that is for ping.
        most_work: most work of shares on a rank, in parts of the mean.
        most_rows: most rows of shares on a rank, in parts of its budget.
    """

    ping: float
    head: float
    most_work: float
    most_rows: float

    @staticmethod
    def of(shared: float, rows: float, filler: float, longest: float, lean: bool) -> Halves:
        """For documents in shares with ``shared`` of all work and ``rows`` of all rows, whole ones of which the longest
        fills ``longest`` of a rank's budget, and ``filler`` work of a rank that has only the sparsest documents.

        Whoever computes the tail of a document in shares needs all its keys once more, so it is all for pong as long as
        that leaves enough work for ping; unless ping is not to be ``lean``.
        """
        if shared <= _FEW_SHARED or not lean:
            ping = min(max((0.5 / max(longest, 0.5)) ** 2, _PING), 0.5)
            return Halves(ping, ping**0.5, 1.0, 1.0)
        ping = min(1.0 - filler / 2 - _SPARE * shared, _PING)
        if ping >= _LITTLE_PING and rows <= _MOST_ROWS_IN_PONG:
            return Halves(ping, 0.0, 1.0 - ping, 0.5)
        return Halves(_PING, 0.5, 1.0, 1.0)


@dataclass(frozen=True)
class Dealt:
    """Documents on ranks.

    Attributes:
        shares: of those that were dealt; the shares of one document follow each other.
        short: [N] documents to fill budgets with, in their order.
        left: [M] (document, low, high) of what found no room.
        work: [D] work of every document.
        short_rate: work per token of the short documents.
        halves: how much of the work is for ping.
        long: [D] bool, whether a document was to be in shares, not only found no room as a whole.
    """

    shares: Shares
    short: np.ndarray
    left: list[tuple[int, float, float]]
    work: np.ndarray
    short_rate: float
    halves: Halves
    long: np.ndarray


def work_of(start: np.ndarray, stop: np.ndarray, ranks: int, cost: CostModel) -> Work:
    """Work of query ranges; forward and backward count equally, and that of all those given comes to 1 per rank."""
    unit = cost.per_direction("both", stop - start, stop).sum(axis=1) * (2 / ranks)

    def work(start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        return np.asarray((1 / unit) @ cost.per_direction("both", stop - start, stop))

    return work


def deal(
    length: np.ndarray, budgets: np.ndarray, work: Work, node: np.ndarray, nano_batches: int, lean: bool = True
) -> Dealt:
    """Deal documents to ranks with about equal work, both directions together.

    Args:
        length: [D] tokens; at least one document.
        budgets: [R] tokens per rank; they add up to all tokens.
        work: of query ranges.
        node: [R] node of every rank, ascending.
        nano_batches: 1, or 2 for ping and pong.
        lean: whether ping may have less work than pong, where that moves fewer bytes.
    """
    order = np.argsort(-length, kind="stable")
    rows, whole = length[order], work(np.zeros_like(length), length[order])
    from_here = np.append(np.cumsum(whole[::-1])[::-1], 0.0)
    count = int((from_here[:-1] > _SHORT_DOCUMENTS * from_here[0]).sum())
    short = np.sort(order[count:])
    filler = (float(from_here[count]) / max(int(rows[count:].sum()), 1), int(rows[count:].sum()))
    rows, whole = rows[:count], whole[:count]
    added = _added_by_share(rows, whole, work)
    surplus = whole - filler[0] * rows
    wanted = max(1.0 - filler[0] * float(budgets.mean()), _LEAST_SHARE)
    in_shares = (surplus > (1 + _OVERFULL) * wanted) | (rows > budgets.max())
    sparse = _Rates(rows.tolist(), whole.tolist(), filler).sparse * float(budgets.mean())
    extra = _shares_each(surplus, added, in_shares, wanted) * added
    halves = Halves(1.0, 1.0, 1.0, 1.0)
    if nano_batches == 2:
        shared = float((whole + extra)[in_shares].sum()) / (len(budgets) + float(extra.sum()))
        longest = float(rows[~in_shares].max(initial=0)) / max(int(budgets.max()), 1)
        halves = Halves.of(shared, float(rows[in_shares].sum() / budgets.sum()), sparse, longest, lean)
        most = halves.most_work - sparse * (1 - halves.most_rows)
        extra = _shares_each(surplus, added, in_shares, min(wanted, most)) * added
    mean = 1.0 + float(extra.sum()) / len(budgets)
    items = _Items(order[:count].tolist(), rows.tolist(), whole.tolist(), added.tolist(), in_shares.tolist())
    nodes, first = np.unique(node, return_index=True)
    bounds = [*first.tolist(), len(budgets)]
    if len(nodes) == 1:
        dealt, left = _deal(items, mean, budgets.tolist(), [1] * len(budgets), filler, halves)
    else:
        # A node's part of a document has what all of its ranks' shares add.
        with_added = (whole + extra).tolist()
        of_nodes = replace(items, work=with_added, added=[0.0] * count)
        dealt = []
        room, ranks = np.add.reduceat(budgets, first).tolist(), np.diff(bounds).tolist()
        by_node, left = _deal(of_nodes, mean, room, ranks, filler, halves)
        per_node: list[list[tuple[int, float]]] = [[] for _ in nodes]
        for item, number, part in by_node:
            per_node[number].append((item, part))
        for number, parts in enumerate(per_node):
            inside = items.of(parts)
            fill = (filler[0], max(room[number] - int(sum(inside.rows)), 0))
            low, high = bounds[number : number + 2]
            target = (sum(with_added[i] * part for i, part in parts) + fill[0] * fill[1]) / (high - low)
            found, missed = _deal(inside, target, budgets[low:high].tolist(), [1] * (high - low), fill, halves)
            dealt += [(parts[i][0], low + rank, parts[i][1] * part) for i, rank, part in found]
            left += [(parts[i][0], parts[i][1] * part) for i, part in missed]
    shares, missing = _shares(items.document, dealt, left)
    long = np.zeros(len(length), bool)
    long[order[:count]] = in_shares
    return Dealt(shares, short, missing, work(np.zeros_like(length), length), filler[0], halves, long)


def _shares_each(surplus: np.ndarray, added: np.ndarray, in_shares: np.ndarray, most: float) -> np.ndarray:
    """[N] shares that documents come in, if a rank can have ``most`` surplus of them."""
    return np.where(in_shares, np.ceil(surplus / np.maximum(most - added, 2 * _LEAST_SHARE)), 0.0)


def _added_by_share(rows: np.ndarray, whole: np.ndarray, work: Work) -> np.ndarray:
    """[N] work that every share of a document has beyond its part of the whole: its keys are read twice more."""
    edges = (rows * np.array([[0.125], [0.375], [0.625], [0.875]])).astype(np.int64)
    half = work(edges[0], edges[1]) + work(edges[2], edges[3])
    return np.maximum(half - 0.5 * whole, 0.0)


@dataclass
class _Items:
    """What is dealt, longest document first."""

    document: list[int]
    rows: list[float]
    work: list[float]
    added: list[float]
    long: list[bool]

    def of(self, parts: Sequence[tuple[int, float]]) -> _Items:
        """Parts of them."""
        return _Items(
            [self.document[i] for i, _ in parts],
            [self.rows[i] * part for i, part in parts],
            [self.work[i] * part for i, part in parts],
            [self.added[i] for i, _ in parts],
            [self.long[i] for i, _ in parts],
        )


def _deal(
    items: _Items, mean: float, room: list[int], ranks: list[int], filler: tuple[float, int], halves: Halves
) -> tuple[list[tuple[int, int, float]], list[tuple[int, float]]]:
    """Deal items to bins: each to the bin that lacks most surplus and has the tokens, or in parts to several.

    Args:
        items: longest first.
        mean: work that each rank should get.
        room: tokens that each bin has.
        ranks: how many ranks it is.
        filler: work per token, and tokens, of the short documents that come after these items.
        halves: how much of a rank may be shares.

    Returns:
        (item, bin, part of it) of all that were dealt, and (item, part of it) of those without room.
    """
    rates = _Rates(items.rows, items.work, filler)
    bins = _Bins(mean, room, ranks, rates.sparse, halves)
    missed: list[tuple[int, float]] = []
    rows, begin = items.rows, 0
    while begin < len(rows):
        end = begin + 1
        while end < len(rows) and rows[end] * _SAME_SIZE > rows[begin]:
            end += 1
        bins.order_by(rates.of_shorter[end])
        item = begin - 1
        while (item := bins.put_small(items, item + 1, end)) < end:
            own, brings, extra, part = rows[item], items.work[item], items.added[item], 1.0
            if items.long[item]:
                part = bins.put_parts(item, part, own, brings, extra, within_need=True)
            elif bins.put_whole(item, own, brings):
                continue
            if part > 0:
                part = bins.put_parts(item, part, own, brings, extra, within_need=False)
            if part > 0:
                missed.append((item, part))
        begin = end
    if max(ranks) == 1:
        return bins.levelled(items, filler[0]), missed
    return bins.dealt, missed


class _Bins:
    """Nodes or ranks while they fill up. Array legend: B bins.

    Args:
        mean: work that each rank should get.
        room: [B] tokens.
        ranks: [B] how many ranks it is.
        sparse: work per token of the sparsest documents.
        halves: how much of a rank may be shares.

    Attributes:
        dealt: (item, bin, part of it) so far.
    """

    def __init__(self, mean: float, room: list[int], ranks: list[int], sparse: float, halves: Halves) -> None:
        self.dealt: list[tuple[int, int, float]] = []
        self._need, self._space, self._sparse = [mean * each for each in ranks], [float(each) for each in room], sparse
        # Pong has short documents beside its shares.
        self._need_shares = [
            halves.most_work * lacks - sparse * (1 - halves.most_rows) * tokens
            for lacks, tokens in zip(self._need, self._space, strict=True)
        ]
        self._space_shares = [halves.most_rows * tokens for tokens in self._space]
        self._over, self._least = _OVERFULL * mean * min(ranks), _LEAST_SHARE * mean
        self._rate = 0.0
        self._heap: list[tuple[float, int]] = []

    def order_by(self, rate: float) -> None:
        """Look first at the bin that lacks most surplus over this work per token."""
        self._rate = rate
        pairs = zip(self._need, self._space, strict=True)
        self._heap = [(rate * tokens - lacks, at) for at, (lacks, tokens) in enumerate(pairs)]
        heapq.heapify(self._heap)

    def put_small(self, items: _Items, item: int, end: int) -> int:
        """Put whole items from ``item`` on, up to ``end``, each into the first bin, as long as they are too small to be
        in shares and it has the tokens; returns the first that was not put."""
        heap, need, space, rate, least = self._heap, self._need, self._space, self._rate, self._least
        rows, work, long, replace_first = items.rows, items.work, items.long, heapq.heapreplace
        while item < end and heap:
            own, brings, at = rows[item], work[item], heap[0][1]
            if long[item] or brings > least or space[at] < own:
                break
            need[at] -= brings
            space[at] -= own
            replace_first(heap, (rate * space[at] - need[at], at))
            self.dealt.append((item, at, 1.0))
            item += 1
        return item

    def put_whole(self, item: int, own: float, brings: float) -> bool:
        """Put an item into the first bin that has the tokens, if there is one and it does not get far too much."""
        aside = []
        while self._heap and self._space[self._heap[0][1]] < own:
            aside.append(heapq.heappop(self._heap))
        found = bool(self._heap)
        if found:
            at = self._heap[0][1]
            over = brings - self._sparse * own - (self._need[at] - self._sparse * self._space[at])
            found = brings <= self._least or over <= self._over or brings - over < self._least
            if found:
                self._put(item, at, 1.0, own, brings)
        for each in aside:
            heapq.heappush(self._heap, each)
        return found

    def put_parts(self, item: int, part: float, own: float, brings: float, extra: float, *, within_need: bool) -> float:
        """Put parts of an item that all of it has ``own`` rows and ``brings`` work into one bin after the other; with
        ``within_need`` as much as they lack, else as much as they have tokens for. Returns what is left of it."""
        aside = []
        most = brings - self._sparse * own
        least = min(self._least / max(brings, 1e-12), 1.0)
        while self._heap and part > 0:
            at = self._heap[0][1]
            taken = part
            if within_need:
                lacks = min(self._need[at] - self._sparse * self._space[at], self._need_shares[at])
                space = min(self._space[at], self._space_shares[at])
                if most * part > lacks + self._over or own * part > space:
                    taken = min((lacks - extra) / most if most > 0 else part, space / own)
                    # Nobody should get a sliver of the rest.
                    if part - taken < least:
                        taken = part if (part - taken) * most <= self._over else part - least
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
        for each in aside:
            heapq.heappush(self._heap, each)
        return part

    def levelled(self, items: _Items, rate: float) -> list[tuple[int, int, float]]:
        """What was dealt, with the shares of long documents resized so that their ranks get what they lack now that
        whole documents are there too; ``rate`` is the work per token of what fills ranks up."""
        shares = sorted((each for each in self.dealt if each[2] < 1 and items.long[each[0]]), key=lambda each: each[0])
        if not shares:
            return self.dealt
        item, at, part = (np.array(column) for column in zip(*shares, strict=True))
        rows, heads = np.array(items.rows), np.flatnonzero(np.append(True, item[1:] != item[:-1]))
        whole = np.repeat(np.add.reduceat(part, heads), np.diff(np.append(heads, len(item))))
        surplus, space = np.array(items.work) - rate * rows, np.array(self._space)
        tiny = 1e-6 * self._least
        for _ in range(_LEVELLINGS):
            # A rank with several shares changes them alike.
            size, own = part * surplus[item], part * rows[item]
            lacks = np.array(self._need) - rate * space
            wanted = size * (1 + lacks[at] / np.maximum(np.bincount(at, size, len(space))[at], tiny))
            most = size * (1 + np.maximum(space, 0.0)[at] / np.maximum(np.bincount(at, own, len(space))[at], tiny))
            resized = np.clip(wanted, 0.0, most) / surplus[item]
            total = np.repeat(np.add.reduceat(resized, heads), np.diff(np.append(heads, len(item))))
            resized *= whole / np.maximum(total, 1e-300)
            self._need = (
                self._need - np.bincount(at, (resized - part) * np.array(items.work)[item], len(space))
            ).tolist()
            space -= np.bincount(at, (resized - part) * rows[item], len(space))
            part = resized
        parts = zip(item.tolist(), at.tolist(), part.tolist(), strict=True)
        return [each for each in self.dealt if each[2] == 1 or not items.long[each[0]]] + list(parts)

    def _put(self, item: int, at: int, part: float, own: float, work: float, *, shares: bool = False) -> None:
        self._need[at] -= work
        self._space[at] -= part * own
        if shares:
            self._need_shares[at] -= work - self._sparse * part * own
            self._space_shares[at] -= part * own
        heapq.heapreplace(self._heap, (self._rate * self._space[at] - self._need[at], at))
        self.dealt.append((item, at, part))


class _Rates:
    """Work per token of what fills ranks up.

    Attributes:
        of_shorter: of all items from each on, and one more.
        sparse: of those with little work per token.
    """

    def __init__(self, rows: list[float], work: list[float], filler: tuple[float, int]) -> None:
        own = np.array([*rows, float(filler[1])])
        brings = np.array([*work, filler[0] * filler[1]])
        rows_from, work_from = (np.cumsum(x[::-1])[::-1] for x in (own, brings))
        self.of_shorter: list[float] = (work_from / np.maximum(rows_from, 1.0)).tolist()
        thin = brings < _DENSE * work_from[0] / max(rows_from[0], 1.0) * own
        if not thin.any():
            thin[-2:] = True
        self.sparse = float(brings[thin].sum()) / max(float(own[thin].sum()), 1.0)


def _shares(
    documents: list[int], dealt: list[tuple[int, int, float]], missed: list[tuple[int, float]]
) -> tuple[Shares, list[tuple[int, float, float]]]:
    """What ranks have, the shares of a document one after the other from its outer rows on, and what nobody has."""
    if not dealt:
        nothing = np.zeros(0, np.int64)
        return Shares(nothing, nothing, np.zeros(0), np.zeros(0)), [(documents[i], 0.0, 1.0) for i, _ in missed]
    item, rank, part = (np.array(column) for column in zip(*dealt, strict=True))
    order = np.argsort(item, kind="stable")
    item, rank, part = item[order], rank[order], part[order]
    ends = np.cumsum(part)
    heads = np.flatnonzero(np.append(True, item[1:] != item[:-1]))
    of_head = np.repeat(heads, np.diff(np.append(heads, len(item))))
    before = ends[of_head] - part[of_head]
    low, high = (np.minimum(x - before, 1.0) for x in (ends - part, ends))
    # Parts add up to 1 but for rounding; the last one goes to the middle where nothing was missed.
    without = {i for i, _ in missed}
    last = np.append(item[1:] != item[:-1], True)
    if without:
        last &= ~np.isin(item, list(without))
    high[last] = 1.0
    low[1:][item[1:] == item[:-1]] = high[:-1][item[1:] == item[:-1]]
    low[heads] = 0.0
    tops = {int(i): float(top) for i, top in zip(item, high, strict=True)}
    left = [(documents[i], tops.get(i, 0.0), 1.0) for i in sorted(without)]
    return Shares(np.array(documents)[item], rank, low, high), left
