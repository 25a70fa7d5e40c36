"""Placing documents so that most of the work is balanced before anything moves.

The order of documents inside a micro-batch means nothing, so home ranks may be chosen freely as long as each gets its
token budget. A query row whose home computes it never travels; only the k,v rows before it in its document do.

Documents are dealt longest first, to nodes and then to the ranks of each node. One that no rank has room for is dealt
to several ranks in *shares*. A share is a part of the head and the part of the tail that mirrors it. Example: two equal
shares of 8 rows are rows 0, 1, 6, 7 and rows 2 to 5. So a rank with a tenth of a document has a tenth of its rows, of
its work, and of the keys that it sends. Ranks are level in forward and in backward, and none sends a long head to all.

What counts for a document is its *surplus*: its work, less the work of as many tokens of filler (``bins.py``). So a
rank with little room for tokens gets as much work as the others. The shortest documents are the filler: they are laid
into what is left of the budgets, and cut where a budget ends.

Ping and pong are placed together (``home_rows.py``): where a document lives says nothing about when it is computed.

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
"""Most ranks of a stage for which two placements are planned, and the cheaper one taken (``distca/plan/choice.py``).
Larger pools take shares, as a second plan would take tens of milliseconds there (benchmarks/results/planner.md)."""
_SHORT_DOCUMENTS = 0.03
"""The part of all work in the shortest documents, which are filler and not dealt one by one. With 0.1 bytes grow by
3.5 %, with 0.01 planning takes 10 % longer (benchmarks/results/planner.md, as of all constants here)."""
ONE_BY_ONE = 2048
"""Most documents per rank that are dealt one by one; shorter ones are filler. It limits planning time for millions of
short documents. Ranks with this many documents are level whatever comes after."""
_PING = 0.25
"""The part of the work that ping gets where documents are in shares: as much as the heads with half of all rows have.
With less, little attention of ping would be left to hide pong's transfers behind. 0.15 and 0.4 move more bytes."""
_LITTLE_PING = 0.06
"""The least part of the work for ping where documents in shares are all for pong. Below it they are cut between both,
so that ping still has attention to hide transfers behind."""
_FEW_SHARED, _SPARE, _MOST_ROWS_IN_PONG = 0.01, 1.05, 0.35
"""Limits on documents in shares. With less than the first part of all work, they do not decide how much is for ping.
The second is a reserve: pong should have room for their work times this. The third is the largest part of all rows that
they may have where they are all for pong: pong has half of all rows, and needs room for other documents too."""


@dataclass(frozen=True)
class Shares:
    """The part of each document that each rank has. Whole documents are one share from 0 to 1.

    A share [low, high) counts from a document's outer rows, at 0, to its middle ones, at 1. Example: of 8 rows, [0,
    0.5) is rows 0, 1, 6 and 7, and [0.5, 1) is rows 2 to 5.

    Attributes:
        document: [S] int64 document of each share.
        rank: [S] int64 home rank of each share.
        low: [S] float64 where the share begins.
        high: [S] float64 where it ends.
    """

    document: np.ndarray
    rank: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class NanoSplit:
    """How the work of a micro-batch is split between ping and pong.

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
    def of(shared: float, rows: float, filler: float, longest: float, lean: bool) -> NanoSplit:
        """Returns the split of a micro-batch.

        The rank that computes the tail of a document in shares needs all keys of the document once more. So, with
        ``lean``, such documents are all for pong, as long as ping has enough work left. With very long ones in both
        nano-batches the fullest rank would keep a tenth fewer keys. But reading the keys twice takes 1 % more of
        attention's time.

        Args:
            shared: part of all work that documents in shares have.
            rows: part of all rows that they have.
            filler: work of a rank that has nothing but the sparsest documents.
            longest: rows of the longest whole document, over a rank's budget.
            lean: whether ping may have less work than pong, where that moves fewer bytes.
        """
        if shared <= _FEW_SHARED or not lean:
            ping = min(max((0.5 / max(longest, 0.5)) ** 2, _PING), 0.5)
            return NanoSplit(ping, ping**0.5, 1.0, 1.0)
        ping = min(1.0 - filler / 2 - _SPARE * shared, _PING)
        if ping >= _LITTLE_PING and rows <= _MOST_ROWS_IN_PONG:
            return NanoSplit(ping, 0.0, 1.0 - ping, 0.5)
        return NanoSplit(_PING, 0.5, 1.0, 1.0)


@dataclass(frozen=True)
class Dealt:
    """Documents that were dealt to ranks, and what is left to fill budgets with.

    Attributes:
        shares: the documents that were dealt; the shares of one document follow each other.
        short: [N] int64 documents that are filler.
        left: [M] (document, low, high) of what found no room.
        work: [D] work of every document.
        short_rate: work per token of the filler.
        split: how much of the work is for ping.
        long: [D] bool, whether a document was meant to be in shares; others came to be, for want of room.
    """

    shares: Shares
    short: np.ndarray
    left: list[tuple[int, float, float]]
    work: np.ndarray
    short_rate: float
    split: NanoSplit
    long: np.ndarray


def work_of(start: np.ndarray, stop: np.ndarray, ranks: int, cost: CostModel) -> Work:
    """Returns a function for the work of query ranges [start, stop).

    Forward and backward count equally. The work of the ranges given here adds up to 1 per rank."""
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
    # Documents longest first; those from ``count`` on are filler. "surplus" is their work over filler's. "wanted" is
    # the surplus of a rank with the mean work. "added" is the work that every share adds to a document.
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
    split = NanoSplit(1.0, 1.0, 1.0, 1.0)
    if nano_batches == 2:
        shared = float((whole + extra)[in_shares].sum()) / (len(budgets) + float(extra.sum()))
        longest = float(rows[~in_shares].max(initial=0)) / max(int(budgets.max()), 1)
        split = NanoSplit.of(shared, float(rows[in_shares].sum() / budgets.sum()), sparse, longest, lean)
        most = split.most_work - sparse * (1 - split.most_rows)
        extra = _shares_each(surplus, added, in_shares, min(wanted, most)) * added
    limits = split.most_work, split.most_rows
    mean = 1.0 + float(extra.sum()) / len(budgets)
    items = Items(rows, whole, added, in_shares, rows)
    # Where the pool is small, most ranks share their documents anyway: the order of shares saves no keys.
    few_keys = nano_batches == 2 and len(budgets) > SMALL_POOL
    first = np.unique(node, return_index=True)[1]
    bounds = [*first.tolist(), len(budgets)]
    if len(first) == 1:
        filled, left = deal_to_bins(items, mean, budgets.tolist(), [1] * len(budgets), filler, limits, few_keys)
        dealt = levelled(items, filled, filler[0])
    else:
        # A node's part of a document contains the work that its ranks' shares will add.
        of_nodes = replace(items, work=whole + extra, added=np.zeros(count))
        room, ranks = np.add.reduceat(budgets, first).tolist(), np.diff(bounds).tolist()
        (by_node, *_), left = deal_to_bins(of_nodes, mean, room, ranks, filler, limits)
        dealt, missed = _dealt_in_nodes(items, of_nodes.work, by_node, budgets, bounds, filler, limits, few_keys)
        left += missed
    shares, missing = _shares(order[:count], dealt, left, rows if few_keys else np.zeros_like(rows))
    long = np.zeros(len(length), bool)
    long[order[:count]] = in_shares
    return Dealt(shares, short, missing, work(np.zeros_like(length), length), filler[0], split, long)


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
    """Deals every node's parts of items to the ranks of the node; returns these parts and what found no room.

    Args:
        items: the items as they were dealt to nodes.
        work: [I] work of each item, with what shares add.
        by_node: the parts of items on nodes.
        budgets: [R] tokens.
        bounds: [nodes + 1] ranks; node n has those from bounds[n] up to bounds[n + 1].
        filler: work per token, and tokens, of the documents that come after the items.
        most: most work of shares on a rank, in parts of the mean, and most rows, in parts of its tokens.
        in_turn: as in :func:`distca.plan.place.bins.deal_to_bins`.
    """
    # Parts sorted by node; for each node its parts are dealt as items of their own, numbered from "begin" on.
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
    """[N] number of shares of each document, if a rank can take a share of ``most`` surplus; 0 for whole ones."""
    return np.where(in_shares, np.ceil(surplus / np.maximum(most - added, 2 * LEAST_SHARE)), 0.0)


def _added_by_share(rows: np.ndarray, whole: np.ndarray, work: Work) -> np.ndarray:
    """[N] work that every share of a document has beyond its part of the whole: its two ranges read keys once more.

    It is measured on a share of half the document: its rows from 1/8 to 3/8 and from 5/8 to 7/8."""
    edges = (rows * np.array([[0.125], [0.375], [0.625], [0.875]])).astype(np.int64)
    half = work(edges[0], edges[1]) + work(edges[2], edges[3])
    return np.maximum(half - 0.5 * whole, 0.0)


def _shares(
    documents: np.ndarray, dealt: Parts, missed: list[tuple[int, float]], keys: np.ndarray
) -> tuple[Shares, list[tuple[int, float, float]]]:
    """Returns the shares of ranks, and (document, low, high) of what no rank has.

    Example: parts 0.2, 0.3 and 0.5 of a document become [0, 0.2), [0.2, 0.5) and [0.5, 1). The shares of a document
    follow one another from its outer rows on. Ranks that read most ``keys`` [I] come first: in pong, which needs more
    keys than ping, they have inner rows."""
    # Parts by document; in it, ranks with most keys first. Cumulated from each document's first part ("heads") on,
    # parts become [low, high).
    read = np.bincount(dealt.bin, keys[dealt.item]).astype(np.int64)
    order = order_by(dealt.item, (read.max(initial=0) - read)[dealt.bin])
    item, rank, part = (column[order] for column in dealt)
    ends = np.cumsum(part)
    heads = np.flatnonzero(np.append(True, item[1:] != item[:-1])[: len(item)])
    of_head = np.repeat(heads, np.diff(np.append(heads, len(item))))
    before = ends[of_head] - part[of_head]
    low, high = (np.minimum(x - before, 1.0) for x in (ends - part, ends))
    # Parts add up to 1 but for rounding: the last share of a document ends at 1, unless some of it found no room.
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
