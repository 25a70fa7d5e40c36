"""Places one nano-batch's documents on ranks by work; long documents are cut from their end.

A micro-batch is computed in one or two parts, the *nano-batches* ping and pong. With the placement
"spread_by_nano_batch", or if "spread" fails, ``lay_out.py`` calls :func:`spread` for each. With "spread", ``shares.py``
and ``home_rows.py`` place both together.

- *Work* is the time of attention. Its unit is the mean work of a rank before documents are cut.
- A *long* document has more work than one rank should get. Parts with one rank's work each are cut from its end.
- *Filler* is the shortest documents. It fills the room that other documents leave.
- The *surplus* of a range of rows is its work minus the work of as many tokens of filler.

Array legend: N ranges (documents, or parts of documents), R ranks. Rows are int64. Constants were compared with other
values: ``benchmarks/planner_constants.py``.
"""

from __future__ import annotations

import heapq

import numpy as np

from distca.plan.cost.model import CostModel
from distca.plan.geometry import range_pairs, start_before
from distca.plan.place.nano_batches import Stream, laid_end_to_end
from distca.plan.place.shares import ONE_BY_ONE, Work, work_of
from distca.plan.sorting import in_turns, order_by

_DENSE = 0.6
"""A document is long only if its work per token is at least this multiple of the mean over all documents."""
_SAME_SIZE = 1.5
"""Ranges are dealt in groups of similar length, so that ranks are sorted once for each group. The longest range of a
group has less than this many times the rows of the shortest."""
_SHORT_DOCUMENTS = 0.03
"""The shortest ranges are filler: as many as together have at most this fraction of the work of all ranges. Parts that
are cut from long documents are no ranges here. With 0.01 instead, the slowest server takes 0.1 % longer."""
_ENOUGH_OVER = 0.005
"""A document is long only if its surplus exceeds the surplus of one rank's part by more than this fraction. Cutting is
also repeated, up to ``_PASSES`` times, until the mean work of a rank changes by less than this, in units of work."""
_LEAST_PART = 0.05
"""No document is long if a rank full of filler would lack at most this part of a rank's mean work."""
_PASSES = 3
"""The most passes. Cuts add work, so each pass cuts all documents anew, for the higher mean work of ranks."""
_CORRECTIONS = 2
"""How often the place of a document's first cut is guessed; each guess corrects the one before. With 1 instead, plans
move 1.8 % more bytes."""


def spread(stream: Stream, budgets: np.ndarray, cost: CostModel, backwards: bool = False) -> tuple[Stream, np.ndarray]:
    """Places ``stream`` on ranks with about equal attention work, forward and backward together.

    Args:
        stream: [N] ranges of documents, in any order; at least one token.
        budgets: [R] tokens per rank; they add up to the stream's tokens.
        cost: seconds per task.
        backwards: whether ranks are taken from the last to the first. The rank with a document's last part reads most
            keys. If only pong is placed backwards, this is usually not the same rank in ping and pong.

    Returns:
        The ranges, some of them cut, and the [N] rank of each.
    """
    if backwards:
        placed, rank = spread(stream, budgets[::-1], cost)
        return placed, len(budgets) - 1 - rank
    # Parts of long documents get ranks first, then other documents, then filler. "left" is the work that each rank
    # still lacks, and "tokens" are the tokens that it has room for.
    work = work_of(stream.start, stream.stop, len(budgets), cost)
    parts, rank_of_part, rest = _cut_long(stream, budgets, work)
    work_of_part = work(parts.start, parts.stop)
    mean = float(work_of_part.sum() + work(rest.start, rest.stop).sum()) / len(budgets)
    left, tokens = _left_over(np.full(len(budgets), mean), budgets, work_of_part, parts, rank_of_part)
    dealt, rank_of_dealt, short = _deal(rest, left, tokens, work)
    _, tokens = _left_over(left, tokens, np.zeros(len(dealt.stop)), dealt, rank_of_dealt)
    fill, rank_of_fill = laid_end_to_end(short, tokens)
    placed = _joined(parts, dealt, fill)
    return placed, np.concatenate((rank_of_part, rank_of_dealt, rank_of_fill))


def _cut_long(stream: Stream, budgets: np.ndarray, work: Work) -> tuple[Stream, np.ndarray, Stream]:
    """Returns parts of long documents with one rank's work each, the rank of each part, and all other ranges."""
    mean = 1.0
    for _ in range(_PASSES):
        parts, ranks, rest = _parts_of(stream, budgets, work, mean)
        total = float(work(parts.start, parts.stop).sum() + work(rest.start, rest.stop).sum()) / len(budgets)
        if abs(total - mean) < _ENOUGH_OVER:
            break
        mean = total
    return parts, ranks, rest


def _parts_of(stream: Stream, budgets: np.ndarray, work: Work, mean: float) -> tuple[Stream, np.ndarray, Stream]:
    """Returns parts for ranks whose mean work is ``mean``, the rank of each part, and all other ranges."""
    # Documents that are not "dense" count as filler here, with "short_rate" work per token. A rank full of filler lacks
    # the work "wanted", so each part gets this surplus. A document with more surplus than "enough" is long.
    start, stop = stream.start, stream.stop.copy()
    rows = stop - start
    whole = work(start, stop)
    dense = whole >= _DENSE * rows / budgets.mean()
    short_rate = float(whole[~dense].sum()) / max(int(rows[~dense].sum()), 1)
    # Budgets are rounded, so some ranks may have room for hardly any tokens. Only ranks with at least half of the
    # largest budget get parts.
    ranks = np.flatnonzero(2 * budgets >= budgets.max())
    wanted = mean - short_rate * float(budgets[ranks].mean())
    if wanted <= _LEAST_PART * mean:
        return _joined(), ranks[:0], stream
    most_rows = int(budgets[ranks].min())
    enough = wanted * (1 + _ENOUGH_OVER)
    surplus = whole - short_rate * rows
    long = np.flatnonzero(dense & (surplus > enough))
    surplus = surplus[long]
    pairs_per_surplus = range_pairs(start[long], stop[long]) / surplus
    corrections = _CORRECTIONS
    cut: list[Stream] = []
    parts = 0
    # In each round, each long document gives a part [middle, high) to a rank without a part. If too few ranks are left,
    # the documents with most surplus come first. The first guess of "middle" assumes that a part's surplus is
    # proportional to its query-key pairs. The next guess uses the surplus per pair of the part guessed before.
    while parts < len(ranks) and len(long):
        order = np.argsort(-surplus, kind="stable")[: len(ranks) - parts]
        long, pairs_per_surplus = long[order], pairs_per_surplus[order]
        low, high = start[long], stop[long]
        for _ in range(corrections):
            middle = np.rint(start_before(high, pairs_per_surplus * wanted)).astype(np.int64)
            middle = np.clip(middle, np.maximum(low, high - most_rows), high - 1)
            gained = work(middle, high) - short_rate * (high - middle)
            pairs_per_surplus = range_pairs(middle, high) / np.maximum(gained, 1e-3 * wanted)
        cut.append(Stream(stream.document[long], middle, high))
        parts += len(long)
        stop[long] = middle
        surplus = work(low, middle) - short_rate * (middle - low)
        still = surplus > enough
        long, surplus, pairs_per_surplus = long[still], surplus[still], pairs_per_surplus[still]
        corrections = 1  # the part that was cut before gives a good guess
    some = stop > start
    rest = Stream(stream.document[some], start[some], stop[some])
    found = _joined(*cut)
    # Parts of one document get neighbouring ranks.
    return _take(found, order_by(found.document, found.start)), ranks[:parts], rest


def _left_over(
    work_left: np.ndarray, tokens_left: np.ndarray, work: np.ndarray, placed: Stream, rank: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Subtracts the [N] ``work`` and the tokens of ``placed`` ranges from [R] ``work_left`` and [R] ``tokens_left``."""
    ranks = len(tokens_left)
    tokens = np.bincount(rank, weights=placed.stop - placed.start, minlength=ranks).astype(np.int64)
    return work_left - np.bincount(rank, weights=work, minlength=ranks), tokens_left - tokens


def _deal(
    ranges: Stream, work_left: np.ndarray, tokens_left: np.ndarray, work: Work
) -> tuple[Stream, np.ndarray, Stream]:
    """Deals ranges, longest first, each to the rank that lacks most surplus among those with enough room.

    Returns the ranges that were dealt, the rank of each, and the ranges that are left as filler."""
    # Ranges [begin, end) are one group (``_SAME_SIZE``). All shorter ranges together have "short_rate" work per token.
    # The first "count" ranges are dealt, and the others are filler. At most R · ``ONE_BY_ONE`` are dealt, which limits
    # planning time. If the rank that lacks most surplus has no room for a range, it gets no more ranges of this group.
    ranges = _take(ranges, np.argsort(ranges.start - ranges.stop, kind="stable"))
    rows, cost = ranges.stop - ranges.start, work(ranges.start, ranges.stop)
    rows_from, work_from = (np.append(np.cumsum(x[::-1])[::-1], 0) for x in (rows, cost))
    count, most = int((work_from[:-1] > _SHORT_DOCUMENTS * work_from[0]).sum()), ONE_BY_ONE * len(tokens_left)
    many, count = count > most, min(count, most)
    lacking, tokens = work_left.tolist(), tokens_left.tolist()
    rank_of = [-1] * len(rows)
    begin = 0
    while begin < count:
        end = max(begin + 1, int(np.searchsorted(-rows[:count], -rows[begin] / _SAME_SIZE)))
        short_rate = float(work_from[end] / rows_from[end]) if end < len(rows) else 0.0
        heap = [(short_rate * room - need, at) for at, (need, room) in enumerate(zip(lacking, tokens, strict=True))]
        heapq.heapify(heap)
        surplus = cost[begin:end] - short_rate * rows[begin:end]
        columns = (rows[begin:end].tolist(), cost[begin:end].tolist(), surplus.tolist())
        for at, (own, brings, more) in enumerate(zip(*columns, strict=True), begin):
            while heap and tokens[heap[0][1]] < own:
                heapq.heappop(heap)
            if not heap:
                break
            key, receiver = heap[0]
            heapq.heapreplace(heap, (key + more, receiver))
            lacking[receiver] -= brings
            tokens[receiver] -= own
            rank_of[at] = receiver
        begin = end
    rank = np.array(rank_of, np.int64)
    dealt = rank >= 0
    rest = _take(ranges, ~dealt)
    # If filler has many ranges, their order must give each rank long and short ones.
    order = in_turns(len(rest.stop), len(tokens_left)) if many else order_by(rest.document, rest.start)
    return _take(ranges, dealt), rank[dealt], _take(rest, order)


def _take(ranges: Stream, chosen: np.ndarray) -> Stream:
    return Stream(ranges.document[chosen], ranges.start[chosen], ranges.stop[chosen])


def _joined(*streams: Stream) -> Stream:
    nothing = Stream(*(np.zeros(0, np.int64),) * 3)
    columns = zip(*((s.document, s.start, s.stop) for s in (nothing, *streams)), strict=True)
    return Stream(*(np.concatenate(column) for column in columns))
