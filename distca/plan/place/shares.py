"""Deals documents of a micro-batch to ranks, so that attention work is nearly balanced before rows move between ranks.

- A rank's *budget* is its number of tokens. *Work* is the time of attention, in units of a rank's mean time.
- A micro-batch is computed as one *nano-batch*, or as two with about half of the tokens each: *ping*, then *pong*. A
  document's *head*, its first rows, may be in ping, and its other rows in pong.
- A *long* document has more work or tokens than one rank should get. It is cut into *shares* for several ranks.
- *Filler* is the shortest documents. ``home_rows.py`` places it last, in the tokens that other documents leave free.
- The *surplus* of a document is its work minus the work of as many tokens of filler.

Array legend: D documents, F documents that are filler, I items (documents that are not filler), N ranges of rows, R
ranks, S shares. ``benchmarks/planner_constants.py`` compared most constants with other values
(benchmarks/results/planner.md).
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
"""For up to this many ranks, ``distca/plan/step.py`` may make two plans and take the cheaper. For more ranks, two plans
would take too long; with ping and pong, :func:`deal` instead makes each rank read the keys of few documents."""
_SHORT_DOCUMENTS = 0.03
"""The shortest documents are filler: as many as have at most this fraction of all work together. With 0.1 instead,
plans move 3.5 % more bytes."""
ONE_BY_ONE = 2048
"""The most documents per rank that are dealt one by one, which limits planning time. All shorter documents are
filler."""
_PING = 0.25
"""The fraction of a document's work in the first half of its rows. Ping gets at most this fraction of all work if long
documents are wholly in pong, otherwise at least this fraction. With 0.15 instead, plans move 1.1 % more bytes."""
_LITTLE_PING = 0.06
"""The least fraction of all work in ping if long documents are wholly in pong. Less work in ping could not hide pong's
transfers, so long documents get heads in ping instead."""
_FEW_SHARED = 0.01
"""If long documents have at most this fraction of all work, ping's work depends on the longest other document."""
_SPARE = 1.05
"""Long documents are wholly in pong only if pong has room for their work times this factor."""
_MOST_ROWS_IN_PONG = 0.35
"""Long documents are wholly in pong only if they have at most this fraction of all rows. Pong has half of all rows, and
also needs room for other documents."""


@dataclass(frozen=True)
class Shares:
    """The shares of documents on ranks. A document that is not cut is one share.

    A share [low, high) is a range in the first half of the document and its mirror image in the second half. With ping
    and pong, it is such a pair of ranges in the head, and another in the tail (``head_cuts.py``). In each half,
    positions run from 0 at the outer end to 1 in the middle. Example: of 8 rows, [0, 0.5) is rows 0, 1, 6 and 7,
    and [0.5, 1) is rows 2 to 5. Early rows read few keys, and late rows many, so shares of equal size have about equal
    work.

    Attributes:
        document: [S] int64 index of the document.
        rank: [S] int64 rank that holds the rows.
        low, high: [S] float64.
    """

    document: np.ndarray
    rank: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class NanoSplit:
    """How the work of a micro-batch is split between ping and pong.

    Attributes:
        ping: fraction of every rank's work that should be in ping.
        head: fraction of a long document's rows that is in ping.
        most_work: the most work of long documents that a rank should have.
        most_rows: the most rows of long documents that a rank should have, divided by the rank's budget.
    """

    ping: float
    head: float
    most_work: float
    most_rows: float

    @staticmethod
    def of(shared: float, rows: float, sparse: float, longest_other: float, lean: bool) -> NanoSplit:
        """Returns the split of a micro-batch.

        If a long document has rows in ping and in pong, ranks read the keys of its head twice, which takes time. So
        ``lean`` puts long documents wholly into pong, if ping has enough other work.

        Args:
            shared: fraction of all work that long documents have.
            rows: fraction of all rows that long documents have.
            sparse: work of a rank that has only documents with little work per token (``_DENSE`` in ``bins.py``).
            longest_other: rows of the longest document that is not *long*, divided by the largest budget.
        """
        # A head with the fraction f of a document's rows has about f² of its work.
        if shared <= _FEW_SHARED or not lean:
            # Ping has half of a rank's tokens. So the fraction 0.5 / longest_other of the longest other document fits
            # into ping.
            ping = min(max((0.5 / max(longest_other, 0.5)) ** 2, _PING), 0.5)
            return NanoSplit(ping, ping**0.5, 1.0, 1.0)
        # Pong needs room for the work of long documents, and for half of the work ``sparse``. The rest may be ping's.
        ping = min(1.0 - sparse / 2 - _SPARE * shared, _PING)
        if ping >= _LITTLE_PING and rows <= _MOST_ROWS_IN_PONG:
            return NanoSplit(ping, 0.0, 1.0 - ping, 0.5)
        return NanoSplit(_PING, 0.5, 1.0, 1.0)


@dataclass(frozen=True)
class Dealt:
    """Documents on ranks, and documents that are still to be placed.

    Attributes:
        shares: the shares of documents on ranks; the shares of one document follow each other.
        short: [F] int64 indices of the documents that are filler.
        left: document, low and high, as in :class:`Shares`, of each part of a document that found no room.
        work: [D] float64 work of each document, if it is not cut.
        short_rate: the filler's work per token.
        long: [D] bool, whether a document is long. A document that is not long has several shares if no rank had room
            for all of it.
    """

    shares: Shares
    short: np.ndarray
    left: list[tuple[int, float, float]]
    work: np.ndarray
    short_rate: float
    split: NanoSplit
    long: np.ndarray


def work_of(start: np.ndarray, stop: np.ndarray, ranks: int, cost: CostModel) -> Work:
    """Returns a function from [N] starts and [N] stops to the [N] work of the query ranges [start, stop).

    Work is the mean of forward and backward time, each divided by the mean time of a rank. This mean is the time of all
    ranges that ``work_of`` is given, divided by ``ranks``."""
    unit = cost.per_direction("both", stop - start, stop).sum(axis=1) * (2 / ranks)

    def work(start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        forward, backward = cost.per_direction("both", stop - start, stop)
        return np.asarray(forward / unit[0] + backward / unit[1])

    return work


def deal(
    length: np.ndarray, budgets: np.ndarray, work: Work, node: np.ndarray, nano_batches: int, lean: bool = True
) -> Dealt:
    """Deals documents to ranks so that ranks have about equal work.

    Args:
        length: [D] tokens of each document, D ≥ 1.
        budgets: [R] tokens per rank; they add up to all tokens.
        work: the function that :func:`work_of` returns for these documents.
        node: [R] node of every rank, ascending.
        lean: whether long documents may be wholly in pong.
    """
    # "order" has documents longest first. The first "count" are dealt one by one, and the others are filler. "filler"
    # is a pair: work per token, and tokens. A rank should have the surplus "wanted". A cut adds the work "added" for
    # each share of a document, and "extra" for all shares of the document. "from_here" is the work of each document and
    # all shorter documents.
    order = order_by(length.max() - length)
    rows, whole = length[order], work(np.zeros_like(length), length[order])
    from_here = np.append(np.cumsum(whole[::-1])[::-1], 0.0)
    count = int((from_here[:-1] > _SHORT_DOCUMENTS * from_here[0]).sum())
    short = np.sort(order[count:])
    if count > ONE_BY_ONE * len(budgets):
        count = ONE_BY_ONE * len(budgets)
        # Ranks get filler in this order, so that each gets longer and shorter documents.
        short = order[count:][in_turns(len(order) - count, len(budgets))]
    filler = (float(from_here[count]) / max(int(rows[count:].sum()), 1), int(rows[count:].sum()))
    rows, whole = rows[:count], whole[:count]
    added = _added_by_share(rows, whole, work)
    surplus = whole - filler[0] * rows
    wanted = max(1.0 - filler[0] * float(budgets.mean()), LEAST_SHARE)
    long = (surplus > (1 + OVERFULL) * wanted) | (rows > budgets.max())
    sparse = Rates(rows, whole, filler).sparse * float(budgets.mean())
    extra = _shares_each(surplus, added, long, wanted) * added
    split = NanoSplit(1.0, 1.0, 1.0, 1.0)
    if nano_batches == 2:
        shared = float((whole + extra)[long].sum()) / (len(budgets) + float(extra.sum()))
        longest_other = float(rows[~long].max(initial=0)) / max(int(budgets.max()), 1)
        split = NanoSplit.of(shared, float(rows[long].sum() / budgets.sum()), sparse, longest_other, lean)
        # Documents with little work per token fill the rows that shares leave free. A rank's shares have to leave time
        # for the work of these documents.
        most = split.most_work - sparse * (1 - split.most_rows)
        extra = _shares_each(surplus, added, long, min(wanted, most)) * added
    limits = split.most_work, split.most_rows
    mean = 1.0 + float(extra.sum()) / len(budgets)
    items = Items(rows, whole, added, long, rows)
    # In small pools, ranks read the keys of nearly all long documents anyway.
    few_keys = nano_batches == 2 and len(budgets) > SMALL_POOL
    first = np.unique(node, return_index=True)[1]
    bounds = [*first.tolist(), len(budgets)]
    if len(first) == 1:
        filled, left = deal_to_bins(items, mean, budgets.tolist(), [1] * len(budgets), filler, limits, few_keys)
        dealt = levelled(items, filled, filler[0])
    else:
        # The work of a node includes what cuts between its ranks will add.
        of_nodes = replace(items, work=whole + extra, added=np.zeros(count))
        room, ranks = np.add.reduceat(budgets, first).tolist(), np.diff(bounds).tolist()
        (by_node, *_), left = deal_to_bins(of_nodes, mean, room, ranks, filler, limits)
        dealt, missed = _dealt_in_nodes(items, of_nodes.work, by_node, budgets, bounds, filler, limits, few_keys)
        left += missed
    shares, missing = _shares(order[:count], dealt, left, rows if few_keys else np.zeros_like(rows))
    is_long = np.zeros(len(length), bool)
    is_long[order[:count]] = long
    return Dealt(shares, short, missing, work(np.zeros_like(length), length), filler[0], split, is_long)


def _dealt_in_nodes(
    items: Items,
    work: np.ndarray,
    by_node: Parts,
    budgets: np.ndarray,
    bounds: list[int],
    filler: tuple[float, int],
    most: tuple[float, float],
    few_keys: bool,
) -> tuple[Parts, list[tuple[int, float]]]:
    """Deals each node's parts of documents, ``by_node``, to the ranks of the node.

    ``work`` [I] includes what cuts inside nodes add. Node n has the ranks from bounds[n] up to bounds[n + 1].
    ``filler``, ``most`` and ``few_keys`` are those of :func:`deal_to_bins`. Returns the parts on ranks, and (item,
    fraction of the item) for each part that found no room."""
    # Each part becomes a new item in "inside", sorted by node. The items from "begin" up to "end" are dealt to the
    # ranks from "low" up to "high" of one node. At the end, indices of "inside" become indices of ``items``.
    order = order_by(by_node.bin)
    item, part = by_node.item[order], by_node.part[order]
    ends = np.searchsorted(by_node.bin[order], np.arange(len(bounds))).tolist()
    inside, part_work = items.of(item, part), work[item] * part
    nodes: list[Filled] = []
    left = []
    for (begin, end), (low, high) in zip(pairwise(ends), pairwise(bounds), strict=True):
        here, room = inside.between(begin, end), budgets[low:high].tolist()
        fill = filler[0], max(sum(room) - int(sum(here.rows.tolist())), 0)
        target = (sum(part_work[begin:end].tolist()) + fill[0] * fill[1]) / (high - low)
        (parts, *state), missed = deal_to_bins(here, target, room, [1] * (high - low), fill, most, few_keys)
        nodes.append(Filled(Parts(begin + parts.item, low + parts.bin, parts.part), *state))
        left += [(int(item[begin + i]), float(part[begin + i]) * more) for i, more in missed]
    found, *columns = zip(*nodes, strict=True)
    parts = Parts(*(np.concatenate(column) for column in zip(*found, strict=True)))
    filled = Filled(parts, *(np.concatenate(column) for column in columns))
    dealt = levelled(inside, filled, filler[0])
    return Parts(item[dealt.item], dealt.bin, part[dealt.item] * dealt.part), left


def _shares_each(surplus: np.ndarray, added: np.ndarray, long: np.ndarray, most: float) -> np.ndarray:
    """Returns [I] float64 number of shares of each long item, each with at most ``most`` surplus; 0 for other items."""
    return np.where(long, np.ceil(surplus / np.maximum(most - added, 2 * LEAST_SHARE)), 0.0)


def _added_by_share(rows: np.ndarray, whole: np.ndarray, work: Work) -> np.ndarray:
    """Returns [I] work that a cut adds for every share of a document, because each share reads keys again.

    The result is the work of one share of half the document, minus half of the document's work. This share has the
    rows from 1/8 to 3/8 of the document, and from 5/8 to 7/8."""
    edges = (rows * np.array([[0.125], [0.375], [0.625], [0.875]])).astype(np.int64)
    half = work(edges[0], edges[1]) + work(edges[2], edges[3])
    return np.maximum(half - 0.5 * whole, 0.0)


def _shares(
    documents: np.ndarray, dealt: Parts, missed: list[tuple[int, float]], keys: np.ndarray
) -> tuple[Shares, list[tuple[int, float, float]]]:
    """Returns the shares that ranks have, and (document, low, high) of the shares that no rank has.

    The parts of a document become neighbouring intervals. Example: parts 0.2, 0.3 and 0.5 become [0, 0.2), [0.2, 0.5)
    and [0.5, 1). The first interval goes to the rank whose items have the largest sum of ``keys`` [I]. ``head_cuts.py``
    reverses the intervals in pong, so there this rank gets inner rows, which read fewer keys."""
    # Parts are sorted by document, then by the keys of their ranks, most keys first. "ends" adds up all parts so far.
    # "before" is the sum of the parts of earlier documents.
    read = np.bincount(dealt.bin, keys[dealt.item]).astype(np.int64)
    order = order_by(dealt.item, (read.max(initial=0) - read)[dealt.bin])
    item, rank, part = (column[order] for column in dealt)
    ends = np.cumsum(part)
    firsts = np.flatnonzero(np.append(True, item[1:] != item[:-1])[: len(item)])
    first = np.repeat(firsts, np.diff(np.append(firsts, len(item))))
    before = ends[first] - part[first]
    low, high = (np.minimum(x - before, 1.0) for x in (ends - part, ends))
    # Against rounding, each interval begins exactly where the one before it ends. The last ends at exactly 1 if all
    # parts of the document found room.
    without = sorted({i for i, _ in missed})
    last = np.append(item[1:] != item[:-1], True)[: len(item)]
    if without:
        last &= ~np.isin(item, without)
    high[last] = 1.0
    low[1:][item[1:] == item[:-1]] = high[:-1][item[1:] == item[:-1]]
    low[firsts] = 0.0
    left = []
    for i in without:
        begin, end = np.searchsorted(item, (i, i + 1)).tolist()
        left.append((int(documents[i]), float(high[end - 1]) if end > begin else 0.0, 1.0))
    return Shares(documents[item], rank, low, high), left
