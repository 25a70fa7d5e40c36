"""Placing documents so that most of the work is balanced before anything moves.

The order of documents inside a micro-batch means nothing, so home ranks may be chosen freely as long as each gets its
token budget. A query row that starts life on the rank that computes it never travels; only the k,v rows of the document
before it do. Documents are dealt longest first, to nodes and then to the ranks of each node. One that no rank has room
for is dealt to several ranks in *shares*. A share is a part of the head and the part of the tail that mirrors it. So a
rank with a tenth of a document has a tenth of its rows and of its work. It reads and sends a tenth of its keys, too:
ranks are level in forward and in backward alike, and none sends a long head to all others.

A rank with little room for tokens should get the same work all the same, so what counts for a document is its
*surplus*: its work less what an equal number of tokens of the shorter documents, which fill the rest of the rank, would
bring. The shortest documents are laid into what is left of the budgets, cut where a budget ends.

Both halves of a micro-batch are placed together (``home_rows.py``): where a document lives says nothing about when it
is computed.

Array legend: D documents, R ranks, S shares. Rows are int64. Work is in units of the mean rank's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from distca.plan.cost.model import CostModel
from distca.plan.place.bins import LEAST_SHARE, OVERFULL, Filled, Items, Parts, Rates, deal_to_bins, levelled
from distca.plan.sorting import in_turns, order_by

Work = Callable[[np.ndarray, np.ndarray], np.ndarray]

SMALL_POOL = 16
"""Ranks of a stage up to which two placements are planned (``distca/plan/choice.py``)."""
_SHORT_DOCUMENTS = 0.03
"""The shortest documents, with this part of all work, are not dealt one by one."""
ONE_BY_ONE = 2048
"""Documents per rank that are dealt one by one at most: the longest. So many are level with whatever fills ranks up."""
_PING = 0.25
"""The share of the work that is for ping where documents are in shares: the heads of half the rows have as much. Less
would move fewer bytes, but leave little attention to hide those of pong behind."""
_LITTLE_PING = 0.06
"""The same where no document in shares has rows in ping."""
_FEW_SHARED, _SPARE, _MOST_ROWS_IN_PONG = 0.01, 1.05, 0.35
"""Limits on documents in shares. The first is the part of all work that is too little to care for. The second is the
room that ranks should have for shares, over what is needed. The third is the largest part of all rows that may be in
documents that are all for pong."""


@dataclass(frozen=True)
class Shares:
    """The part of each document that each rank has. Whole documents are one share from 0 to 1.

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
        """The halves of a micro-batch.

        Documents in shares have ``shared`` of all work and ``rows`` of all rows. The longest whole one fills
        ``longest`` of a rank's budget. A rank that has only the sparsest documents has ``filler`` work.

        The rank that computes the tail of a document in shares needs all its keys once more. So such documents are all
        for pong as long as that leaves enough work for ping, unless ping is not to be ``lean``. With very long ones in
        both halves the fullest rank would keep a tenth fewer keys. But reading the keys twice takes 1 % more of
        attention's time.
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
        short: [N] documents to fill budgets with.
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
    order = order_by(length.max() - length)
    rows, whole = length[order], work(np.zeros_like(length), length[order])
    from_here = np.append(np.cumsum(whole[::-1])[::-1], 0.0)
    count = int((from_here[:-1] > _SHORT_DOCUMENTS * from_here[0]).sum())
    short = np.sort(order[count:])
    if count > ONE_BY_ONE * len(budgets):
        count = ONE_BY_ONE * len(budgets)
        short = order[count:][in_turns(len(order) - count, len(budgets))]
    filler = (float(from_here[count]) / max(int(rows[count:].sum()), 1), int(rows[count:].sum()))
    rows, whole = rows[:count], whole[:count]
    added = _added_by_share(rows, whole, work)
    surplus = whole - filler[0] * rows
    wanted = max(1.0 - filler[0] * float(budgets.mean()), LEAST_SHARE)
    in_shares = (surplus > (1 + OVERFULL) * wanted) | (rows > budgets.max())
    sparse = Rates(rows, whole, filler).sparse * float(budgets.mean())
    extra = _shares_each(surplus, added, in_shares, wanted) * added
    halves = Halves(1.0, 1.0, 1.0, 1.0)
    if nano_batches == 2:
        shared = float((whole + extra)[in_shares].sum()) / (len(budgets) + float(extra.sum()))
        longest = float(rows[~in_shares].max(initial=0)) / max(int(budgets.max()), 1)
        halves = Halves.of(shared, float(rows[in_shares].sum() / budgets.sum()), sparse, longest, lean)
        most = halves.most_work - sparse * (1 - halves.most_rows)
        extra = _shares_each(surplus, added, in_shares, min(wanted, most)) * added
    limits = halves.most_work, halves.most_rows
    mean = 1.0 + float(extra.sum()) / len(budgets)
    items = Items(rows, whole, added, in_shares, rows)
    # In small pools most ranks share their documents anyway.
    few_keys = nano_batches == 2 and len(budgets) > SMALL_POOL
    first = np.unique(node, return_index=True)[1]
    bounds = [*first.tolist(), len(budgets)]
    if len(first) == 1:
        filled, left = deal_to_bins(items, mean, budgets.tolist(), [1] * len(budgets), filler, limits, few_keys)
        dealt = levelled(items, filled, filler[0])
    else:
        # A node's part of a document has what all of its ranks' shares add.
        of_nodes = replace(items, work=whole + extra, added=np.zeros(count))
        room, ranks = np.add.reduceat(budgets, first).tolist(), np.diff(bounds).tolist()
        (by_node, *_), left = deal_to_bins(of_nodes, mean, room, ranks, filler, limits)
        dealt, missed = _dealt_in_nodes(items, of_nodes.work, by_node, budgets, bounds, filler, limits, few_keys)
        left += missed
    shares, missing = _shares(order[:count], dealt, left, rows if few_keys else np.zeros_like(rows))
    long = np.zeros(len(length), bool)
    long[order[:count]] = in_shares
    return Dealt(shares, short, missing, work(np.zeros_like(length), length), filler[0], halves, long)


def _dealt_in_nodes(
    items: Items,
    work: np.ndarray,
    by_node: Parts,
    budgets: np.ndarray,
    bounds: list[int],
    filler: tuple[float, int],
    most: tuple[float, float],
    in_turn: bool,
) -> tuple[Parts, list[tuple[int, float]]]:
    """Deal what every node has, of items with [I] ``work`` there, to its ranks, which are those between its bounds."""
    order = order_by(by_node.bin)
    item, part = by_node.item[order], by_node.part[order]
    ends = np.searchsorted(by_node.bin[order], np.arange(len(bounds))).tolist()
    inside, brings = items.of(item, part), work[item] * part
    nodes: list[Filled] = []
    left = []
    for (begin, end), (low, high) in zip(pairwise(ends), pairwise(bounds), strict=True):
        here, room = inside.between(begin, end), budgets[low:high].tolist()
        fill = filler[0], max(sum(room) - int(sum(here.rows.tolist())), 0)
        target = (sum(brings[begin:end].tolist()) + fill[0] * fill[1]) / (high - low)
        (parts, *state), missed = deal_to_bins(here, target, room, [1] * (high - low), fill, most, in_turn)
        nodes.append(Filled(Parts(begin + parts.item, low + parts.bin, parts.part), *state))
        left += [(int(item[begin + i]), float(part[begin + i]) * more) for i, more in missed]
    found, *columns = zip(*nodes, strict=True)
    parts = Parts(*(np.concatenate(column) for column in zip(*found, strict=True)))
    filled = Filled(parts, *(np.concatenate(column) for column in columns))
    dealt = levelled(inside, filled, filler[0])
    return Parts(item[dealt.item], dealt.bin, part[dealt.item] * dealt.part), left


def _shares_each(surplus: np.ndarray, added: np.ndarray, in_shares: np.ndarray, most: float) -> np.ndarray:
    """[N] shares that documents come in, if a rank can have ``most`` surplus of them."""
    return np.where(in_shares, np.ceil(surplus / np.maximum(most - added, 2 * LEAST_SHARE)), 0.0)


def _added_by_share(rows: np.ndarray, whole: np.ndarray, work: Work) -> np.ndarray:
    """[N] work that every share of a document has beyond its part of the whole: its keys are read twice more."""
    edges = (rows * np.array([[0.125], [0.375], [0.625], [0.875]])).astype(np.int64)
    half = work(edges[0], edges[1]) + work(edges[2], edges[3])
    return np.maximum(half - 0.5 * whole, 0.0)


def _shares(
    documents: np.ndarray, dealt: Parts, missed: list[tuple[int, float]], keys: np.ndarray
) -> tuple[Shares, list[tuple[int, float, float]]]:
    """Returns the shares of ranks, and what nobody has.

    The shares of a document follow one another from its outer rows on. Ranks that read most ``keys`` [N] come first: in
    pong, which needs more of them than ping, they have inner rows."""
    read = np.bincount(dealt.bin, keys[dealt.item]).astype(np.int64)
    order = order_by(dealt.item, (read.max(initial=0) - read)[dealt.bin])
    item, rank, part = (column[order] for column in dealt)
    ends = np.cumsum(part)
    heads = np.flatnonzero(np.append(True, item[1:] != item[:-1])[: len(item)])
    of_head = np.repeat(heads, np.diff(np.append(heads, len(item))))
    before = ends[of_head] - part[of_head]
    low, high = (np.minimum(x - before, 1.0) for x in (ends - part, ends))
    # Parts add up to 1 but for rounding; the last one goes to the middle where nothing was missed.
    without = sorted({i for i, _ in missed})
    last = np.append(item[1:] != item[:-1], True)[: len(item)]
    if without:
        last &= ~np.isin(item, without)
    high[last] = 1.0
    low[1:][item[1:] == item[:-1]] = high[:-1][item[1:] == item[:-1]]
    low[heads] = 0.0
    left = []
    for i in without:
        begin, end = np.searchsorted(item, (i, i + 1)).tolist()
        left.append((int(documents[i]), float(high[end - 1]) if end > begin else 0.0, 1.0))
    return Shares(documents[item], rank, low, high), left
