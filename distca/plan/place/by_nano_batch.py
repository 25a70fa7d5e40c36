"""Placing each nano-batch by itself: long documents in parts that are cut from their end.

Documents with more work than one rank should have are cut, from their end, into parts of one rank's work each. The
others are dealt by work, and the shortest are filler: they fill what is left of the budgets. Which documents are
computed in ping and which in pong is settled before (``nano_batches.py``), so hardly any document has rows in both.
Small pools take this placement where it costs less than that of both together (``shares.py``,
``distca/plan/choice.py``).

What counts for a range is its *surplus*: its work, less the work of as many tokens of filler.

Array legend: N ranges (a document, or a part of one), R ranks. Rows are int64. Work is in units of the mean rank's.
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
"""The work per token, over the mean, from which a document is cut where it exceeds a rank's work. Less dense ones are
needed everywhere as filler. With 0.4 bytes grow by 0.7 % (benchmarks/results/planner.md, as of all constants here)."""
_SAME_SIZE = 1.5
"""The ratio of rows within which ranges are dealt together, against the same rate of filler, to sort ranks less
often."""
_SHORT_DOCUMENTS = 0.03
"""The part of all work in the shortest documents, which are filler and not dealt one by one. With 0.01 or 0.1 the
slowest server is 0.05 to 0.12 % slower."""
_ENOUGH_OVER = 0.005
"""The surplus above a rank's that a document may keep uncut, as a part of it. The mean work is settled, too, when cuts
change it by less."""
_LEAST_PART = 0.05
"""The least surplus that a rank should get from long documents, in parts of the mean work. With less, filler alone
gives ranks nearly all their work, and no document is cut."""
_PASSES = 3
"""Times that documents are cut anew, as cuts add work and so raise the mean."""
_CORRECTIONS = 2
"""Times that the place of a document's first cut is corrected by its measured work. With one bytes grow by 1.8 %."""


def spread(stream: Stream, budgets: np.ndarray, cost: CostModel, backwards: bool = False) -> tuple[Stream, np.ndarray]:
    """Places ``stream`` on ranks with about equal attention work, both directions together.

    Args:
        stream: [N] ranges of documents, in any order; at least one token.
        budgets: [R] tokens per rank; they add up to the stream's tokens.
        cost: seconds per CA-task.
        backwards: whether ranks are dealt to in the opposite order. The parts of a document go to one rank after the
            other, and the last part needs the keys of all. So ping forwards and pong backwards level the keys of ranks.

    Returns:
        The ranges, some of them cut, and the rank of each.
    """
    if backwards:
        placed, rank = spread(stream, budgets[::-1], cost)
        return placed, len(budgets) - 1 - rank
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
    """Returns parts that fill one rank each, the rank of each, and everything else.

    Every part loads keys once more, which adds work: so the cuts are made again with the higher mean.
    """
    mean = 1.0
    for _ in range(_PASSES):
        parts, ranks, rest = _parts_of(stream, budgets, work, mean)
        total = float(work(parts.start, parts.stop).sum() + work(rest.start, rest.stop).sum()) / len(budgets)
        if abs(total - mean) < _ENOUGH_OVER:
            break
        mean = total
    return parts, ranks, rest


def _parts_of(stream: Stream, budgets: np.ndarray, work: Work, mean: float) -> tuple[Stream, np.ndarray, Stream]:
    """Returns the parts for a rank's work of ``mean``, the rank of each, and what is left of all ranges."""
    # A rank full of filler ("short_rate" per token) lacks the work "wanted"; each part brings that surplus. Documents
    # of more surplus than "enough" are long.
    start, stop = stream.start, stream.stop.copy()
    rows = stop - start
    whole = work(start, stop)
    dense = whole >= _DENSE * rows / budgets.mean()
    short_rate = float(whole[~dense].sum()) / max(int(rows[~dense].sum()), 1)
    # Only ranks with at least half of the largest budget get parts: ``align`` may leave the last ranks next to nothing.
    ranks = np.flatnonzero(2 * budgets >= budgets.max())
    wanted = mean - short_rate * float(budgets[ranks].mean())
    if wanted <= _LEAST_PART * mean:
        return _joined(), ranks[:0], stream
    most_rows = int(budgets[ranks].min())
    enough = wanted * (1 + _ENOUGH_OVER)
    surplus = whole - short_rate * rows
    long = np.flatnonzero(dense & (surplus > enough))
    surplus = surplus[long]
    pairs_per_work = range_pairs(start[long], stop[long]) / surplus
    corrections = _CORRECTIONS
    cut: list[Stream] = []
    parts = 0
    # All long documents lose one rank's part from their end at once, until none is long or every rank has a part. The
    # cut ("middle") is first guessed from pairs, as if surplus grew with them, then corrected by its own work.
    while parts < len(ranks) and len(long):
        order = np.argsort(-surplus, kind="stable")[: len(ranks) - parts]
        long, pairs_per_work = long[order], pairs_per_work[order]
        low, high = start[long], stop[long]
        for _ in range(corrections):
            middle = np.rint(start_before(high, pairs_per_work * wanted)).astype(np.int64)
            middle = np.clip(middle, np.maximum(low, high - most_rows), high - 1)
            gained = work(middle, high) - short_rate * (high - middle)
            pairs_per_work = range_pairs(middle, high) / np.maximum(gained, 1e-3 * wanted)
        cut.append(Stream(stream.document[long], middle, high))
        parts += len(long)
        stop[long] = middle
        surplus = work(low, middle) - short_rate * (middle - low)
        still = surplus > enough
        long, surplus, pairs_per_work = long[still], surplus[still], pairs_per_work[still]
        corrections = 1  # from now on the guess comes from the part cut before, which is much alike
    some = stop > start
    rest = Stream(stream.document[some], start[some], stop[some])
    found = _joined(*cut)
    # Parts of one document get neighbouring ranks.
    return _take(found, order_by(found.document, found.start)), ranks[:parts], rest


def _left_over(
    work_left: np.ndarray, tokens_left: np.ndarray, work: np.ndarray, placed: Stream, rank: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """[R] work and [R] tokens that ranks still lack after they got ``placed``, with ``work`` [N] on the [N]
    ``rank``."""
    ranks = len(tokens_left)
    tokens = np.bincount(rank, weights=placed.stop - placed.start, minlength=ranks).astype(np.int64)
    return work_left - np.bincount(rank, weights=work, minlength=ranks), tokens_left - tokens


def _deal(
    ranges: Stream, work_left: np.ndarray, tokens_left: np.ndarray, work: Work
) -> tuple[Stream, np.ndarray, Stream]:
    """Deals ranges, longest first, each to the rank that lacks most surplus and has the tokens; returns those dealt,
    their ranks, and what is left as filler."""
    # Ranges [begin, end) of about one size are dealt together. "short_rate" is the work per token of all shorter ones,
    # and the heap has ranks by the surplus that they lack, most first.
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
            # A rank without room for this range leaves the heap until the next size.
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
    order = in_turns(len(rest.stop), len(tokens_left)) if many else order_by(rest.document, rest.start)
    return _take(ranges, dealt), rank[dealt], _take(rest, order)


def _take(ranges: Stream, chosen: np.ndarray) -> Stream:
    return Stream(ranges.document[chosen], ranges.start[chosen], ranges.stop[chosen])


def _joined(*streams: Stream) -> Stream:
    nothing = Stream(*(np.zeros(0, np.int64),) * 3)
    columns = zip(*((s.document, s.start, s.stop) for s in (nothing, *streams)), strict=True)
    return Stream(*(np.concatenate(column) for column in columns))
