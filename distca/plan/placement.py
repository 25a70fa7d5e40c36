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
from dataclasses import dataclass
from typing import Literal

import numpy as np

from distca.plan.cost.model import CostModel

Placement = Literal["in_order", "spread"]
Work = Callable[[np.ndarray, np.ndarray], np.ndarray]

_DENSE = 0.6
"""Documents with at least this part of the mean work per token are not needed to fill ranks that have enough work."""
_SAME_SIZE = 1.5
"""Documents within this factor of rows are dealt against the same rate of the shorter documents."""
_SHORT_DOCUMENTS = 0.03
"""The shortest documents, with this part of all work, are not dealt one by one."""
_OVERFULL = 0.012
"""A rank may get so much more than it lacks, of the mean work, rather than a share."""
_LEAST_SHARE = 0.05
"""Least work of a share, in parts of the mean."""


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
class Dealt:
    """Documents on ranks.

    Attributes:
        shares: of those that were dealt; the shares of one document follow each other.
        short: [N] documents to fill budgets with, in their order.
        left: [M] (document, low, high) of what found no room.
        work: [D] work of every document.
        short_rate: work per token of the short documents.
        mean: work of the mean rank, with what reading keys once more for every share adds.
    """

    shares: Shares
    short: np.ndarray
    left: list[tuple[int, float, float]]
    work: np.ndarray
    short_rate: float
    mean: float


def work_of(length: np.ndarray, ranks: int, cost: CostModel) -> Work:
    """Work of query ranges; forward and backward count equally, and all documents' comes to 1 per rank."""
    unit = cost.per_direction("both", length, length).sum(axis=1) * (2 / ranks)

    def work(start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        return np.asarray((1 / unit) @ cost.per_direction("both", stop - start, stop))

    return work


def deal(length: np.ndarray, budgets: np.ndarray, work: Work, node: np.ndarray) -> Dealt:
    """Deal documents to ranks with about equal work, both directions together.

    Args:
        length: [D] tokens; at least one document.
        budgets: [R] tokens per rank; they add up to all tokens.
        work: of query ranges.
        node: [R] node of every rank, ascending.
    """
    order = np.argsort(-length, kind="stable")
    rows, whole = length[order], work(np.zeros_like(length), length[order])
    from_here = np.append(np.cumsum(whole[::-1])[::-1], 0.0)
    count = int((from_here[:-1] > _SHORT_DOCUMENTS * from_here[0]).sum())
    short = np.sort(order[count:])
    short_rate = float(from_here[count]) / max(int(rows[count:].sum()), 1)
    added = _added_by_share(rows[:count], whole[:count], work)
    mean = 1.0
    surplus = whole[:count] - short_rate * rows[:count]
    wanted = max(mean - short_rate * float(budgets.mean()), _LEAST_SHARE)
    mean += float((added * np.maximum(np.ceil(surplus / wanted - _OVERFULL) - 1, 0)).sum()) / len(budgets)
    items = _Items(order[:count].tolist(), rows[:count].tolist(), whole[:count].tolist(), added.tolist())
    nodes, first = np.unique(node, return_index=True)
    filler = (short_rate, int(rows[count:].sum()))
    if len(nodes) == 1:
        dealt, left = _deal(items, [mean] * len(budgets), budgets.tolist(), filler)
    else:
        bounds = [*first.tolist(), len(budgets)]
        room = np.add.reduceat(budgets, first).tolist()
        need = [mean * (high - low) for low, high in zip(bounds[:-1], bounds[1:], strict=True)]
        by_node, left = _deal(items, need, room, filler)
        dealt = []
        per_node: list[list[tuple[int, float]]] = [[] for _ in nodes]
        for item, number, part in by_node:
            per_node[number].append((item, part))
        for number, parts in enumerate(per_node):
            inside = items.of(parts)
            fill_rows = max(room[number] - int(sum(inside.rows)), 0)
            ranks = bounds[number + 1] - bounds[number]
            target = (sum(inside.work) + short_rate * fill_rows) / ranks
            here = budgets[bounds[number] : bounds[number + 1]].tolist()
            found, missed = _deal(inside, [target] * ranks, here, (short_rate, fill_rows))
            dealt += [(parts[i][0], bounds[number] + rank, part * parts[i][1]) for i, rank, part in found]
            left += [(parts[i][0], part * parts[i][1]) for i, part in missed]
    shares, missing = _shares(items.document, dealt, left)
    return Dealt(shares, short, missing, _by_document(order, whole), short_rate, mean)


def _by_document(order: np.ndarray, values: np.ndarray) -> np.ndarray:
    found = np.empty_like(values)
    found[order] = values
    return found


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

    def of(self, parts: Sequence[tuple[int, float]]) -> _Items:
        """Parts of them."""
        return _Items(
            [self.document[i] for i, _ in parts],
            [self.rows[i] * part for i, part in parts],
            [self.work[i] * part + (self.added[i] if part < 1 else 0.0) for i, part in parts],
            [self.added[i] for i, _ in parts],
        )


def _deal(
    items: _Items, need: list[float], room: list[int], filler: tuple[float, int]
) -> tuple[list[tuple[int, int, float]], list[tuple[int, float]]]:
    """Deal items to bins: each to the bin that lacks most surplus and has the tokens, or in parts to several.

    Args:
        items: longest first.
        need: work that each bin should get.
        room: tokens that it has.
        filler: work per token, and tokens, of the short documents that come after these items.

    Returns:
        (item, bin, part of it) of all that were dealt, and (item, part of it) of those without room.
    """
    rows, work = items.rows, items.work
    need, left_room = list(need), [float(each) for each in room]
    mean = sum(need) / len(need)
    least = _LEAST_SHARE * min(mean, 1.0)
    dense = _DENSE * (sum(work) + filler[0] * filler[1]) / max(sum(rows) + filler[1], 1)
    sparse = [(own, brings) for own, brings in zip(rows, work, strict=True) if brings < dense * own]
    sparse_rows = sum(own for own, _ in sparse) + filler[1]
    sparse_rate = (sum(brings for _, brings in sparse) + filler[0] * filler[1]) / max(sparse_rows, 1)
    rows_from, work_from = [float(filler[1])], [filler[0] * filler[1]]
    for own, brings in zip(reversed(rows), reversed(work), strict=True):
        rows_from.append(rows_from[-1] + own)
        work_from.append(work_from[-1] + brings)
    rows_from.reverse()
    work_from.reverse()
    dealt: list[tuple[int, int, float]] = []
    missed: list[tuple[int, float]] = []
    begin = 0
    while begin < len(rows):
        end = begin + 1
        while end < len(rows) and rows[end] * _SAME_SIZE > rows[begin]:
            end += 1
        rate = work_from[end] / rows_from[end] if rows_from[end] else 0.0
        heap = [(rate * space - lacks, at) for at, (lacks, space) in enumerate(zip(need, left_room, strict=True))]
        heapq.heapify(heap)
        for item in range(begin, end):
            aside: list[tuple[float, int]] = []
            part, own, brings, extra = 1.0, rows[item], work[item], items.added[item]
            surplus = brings - rate * own
            while heap:
                key, at = heap[0]
                fits = part * own <= left_room[at] + 1e-6
                taken = part
                # What the rank lacks if the sparsest documents fill the rest of it.
                lacks = need[at] - sparse_rate * left_room[at]
                most = brings - sparse_rate * own
                over = part * most - lacks + (extra if part < 1 else 0.0)
                if brings > least and (not fits or over > _OVERFULL * mean):
                    taken = min((lacks - extra) / most if most > 0 else part, left_room[at] / own, part)
                    if taken * brings < least or (part - taken) * brings < least:
                        taken = part
                if taken == part and not fits:
                    aside.append(heapq.heappop(heap))
                    continue
                added = extra if taken < 1 else 0.0
                heapq.heapreplace(heap, (key + taken * surplus + added, at))
                need[at] -= taken * brings + added
                left_room[at] -= taken * own
                dealt.append((item, at, taken))
                part -= taken
                if part <= 0:
                    break
            if part > 0:
                missed.append((item, part))
            for each in aside:
                heapq.heappush(heap, each)
        begin = end
    return dealt, missed


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
    low, high = ends - part - before, ends - before
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
