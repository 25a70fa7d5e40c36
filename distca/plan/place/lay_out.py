"""Lays out a micro-batch: chooses the home rank, the row and the nano-batch of each token.

The *home rank* of a token computes the token's linear layers; the *row* is the token's index in the home rank's
tensors. A micro-batch is computed as one or two *nano-batches*, ping and pong: the transfers of one run during the
computation of the other. If a document has tokens in both, its first tokens are in ping and its last tokens in pong.

Array legend: D documents of the micro-batch, R ranks. Arrays are int64, except seconds of work. A *shard* is a range
of one document on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from distca.errors import PlanError
from distca.plan.cost.analytic import area_cost
from distca.plan.cost.model import CostModel
from distca.plan.geometry import range_pairs
from distca.plan.layout import Layout, Shards
from distca.plan.place.by_nano_batch import spread
from distca.plan.place.home_rows import home_rows
from distca.plan.place.nano_batches import (
    Dealing,
    Stream,
    dealt_evenly,
    laid_end_to_end,
    streams_of,
    without_short_tail,
)
from distca.plan.place.shares import deal, work_of
from distca.plan.place.swaps import OF_NANO_BATCHES, OF_RANKS, swapped
from distca.plan.place.whole import whole_documents
from distca.plan.sorting import order_by

Placement = Literal["in_order", "spread", "spread_by_nano_batch", "whole"]
"""How the tokens of a nano-batch are placed on ranks; see :func:`lay_out`."""


def lay_out(
    lengths: Sequence[int] | np.ndarray,
    ranks: int,
    *,
    nano_batches: int = 1,
    rank_of: Sequence[int] | np.ndarray | None = None,
    align: int = 1,
    dealing: Dealing = "in_order",
    placement: Placement = "in_order",
    cost: CostModel | None = None,
    ranks_per_node: int = 0,
) -> tuple[Layout, ...]:
    """Places a micro-batch's documents on ranks, and returns one layout per nano-batch.

    Without ``rank_of`` every rank gets about equally many tokens of each nano-batch.

    Args:
        lengths: [D] tokens per document, each at least 1.
        ranks: number of home ranks.
        nano_batches: 1, or 2 for ping and pong.
        rank_of: [D] home rank of each document. Documents then stay whole on these ranks, and ``align``, ``placement``
            and ``cost`` are not used.
        align: the rows of all ranks but the last are multiples of this, so that tensor-parallel ranks can split them.
        dealing: how documents are dealt to two nano-batches, except with the placement "spread". "in_order": the first
            documents go to ping. "even" or "lean": ping and pong get about equal attention work. In each case ping may
            get up to 1/32 more tokens, so that pong gets fewer short ends of documents. With the placement "spread"
            ping gets a quarter to half of the work. If ``dealing`` is "lean", "spread" may give ping less, so that
            long documents (``shares.py``) are in pong alone.
        placement: which tokens are on which rank. "in_order": one document after the other, cut where a rank is full.
            "spread": ranks get about equal attention work, summed over ping and pong. "spread_by_nano_batch": ranks get
            about equal attention work in each nano-batch; also used in place of "spread" if ``home_rows.py`` finds no
            room for a document. "whole": each of the 2,048 longest documents stays whole if a rank has room for it
            when its turn comes. Shorter documents are cut where a rank is full (``whole.py``). With an ``align``
            of 1 no document is cut between ranks if swaps make the ranks' tokens about equal (``swaps.py``).
        cost: gives the seconds of attention, which "spread", "spread_by_nano_batch" and "whole" balance. With None
            these placements balance the number of query-key pairs.
        ranks_per_node: number of consecutive ranks that share a node; 0 if all ranks share one. "spread" deals
            documents to nodes, and then to the ranks of each node.

    Raises:
        PlanError: an argument is out of its range; or with "whole", a document is longer than a rank's whole room.
    """
    length = np.asarray(lengths, dtype=np.int64).reshape(-1)
    _check(length, ranks, nano_batches, rank_of, align, dealing, placement)
    if rank_of is not None:
        placed = _place_whole(length, ranks, nano_batches, np.asarray(rank_of, dtype=np.int64), dealing)
    elif placement == "whole":
        placed = _fill_whole(length, ranks, nano_batches, align, cost or area_cost(), dealing)
    else:
        cost = cost or area_cost()
        found = None
        if placement == "spread":
            found = _in_shares(length, ranks, nano_batches, align, cost, ranks_per_node, lean=dealing == "lean")
        by_work = None if placement == "in_order" else cost
        placed = found or _place_nano_batches(length, ranks, nano_batches, align, dealing, by_work)
    layouts: list[Layout] = []
    for shards, rows in placed:
        layouts.append(_layout(len(length), ranks, shards, rows, layouts[-1] if layouts else None))
    return tuple(layouts)


def _check(
    length: np.ndarray,
    ranks: int,
    nano_batches: int,
    rank_of: Sequence[int] | np.ndarray | None,
    align: int,
    dealing: str,
    placement: str,
) -> None:
    if ranks < 1:
        raise PlanError(f"A layout needs at least one rank, not {ranks}.")
    if nano_batches not in (1, 2):
        raise PlanError(f"A micro-batch is cut into 1 or 2 nano-batches, not {nano_batches}.")
    if align < 1:
        raise PlanError(f"align is {align} and must be at least 1.")
    if dealing not in get_args(Dealing):
        raise PlanError(f"dealing is {dealing!r}; choose one of {', '.join(get_args(Dealing))}.")
    if placement not in get_args(Placement):
        raise PlanError(f"placement is {placement!r}; choose one of {', '.join(get_args(Placement))}.")
    if len(length) and length.min() < 1:
        raise PlanError(
            f"Document {int(length.argmin())} has {int(length.min())} tokens; every document needs at least 1."
        )
    if rank_of is not None:
        homes = np.asarray(rank_of)
        if len(homes) != len(length):
            raise PlanError(f"rank_of names {len(homes)} home ranks for {len(length)} documents.")
        outside = homes[(homes < 0) | (homes >= ranks)]
        if len(outside):
            raise PlanError(f"rank_of names rank {int(outside[0])}, but the {ranks} ranks are 0 to {ranks - 1}.")


def _place_nano_batches(
    length: np.ndarray, ranks: int, nano_batches: int, align: int, dealing: Dealing, cost: CostModel | None
) -> list[tuple[Shards, np.ndarray]]:
    """Deals documents to nano-batches, and then places each nano-batch's documents on ranks.

    With a ``cost``, ranks get about equal work in each nano-batch. Without one, documents are placed in order."""
    total = int(length.sum())
    documents = np.arange(len(length))
    cut = _half(total, align)
    if nano_batches == 2 and dealing != "in_order":
        documents = dealt_evenly(length, documents, ping_first=True)
    if nano_batches == 2:
        # A cut that moves is rounded up to a multiple of ``ranks * align``, so that ping's tokens divide evenly.
        cut = without_short_tail(length, documents, cut, ranks * align)
    placed = []
    for stream, bounds in zip(
        streams_of(length, documents, nano_batches, cut), _bounds(total, cut, ranks, nano_batches, align), strict=True
    ):
        if cost is None or not bounds[-1]:
            placed.append(_cut_at_ranks(stream, bounds))
            continue
        # Pong is placed from the last rank to the first. Otherwise one rank would read most keys in ping and in pong.
        found, rank = spread(stream, np.diff(bounds), cost, backwards=len(placed) == 1)
        goes_on = np.zeros(len(length), bool)
        goes_on[stream.document] = stream.stop < length[stream.document]
        placed.append(_in_rows(found, rank, goes_on, bounds))
    return placed


def _half(total: int, align: int) -> int:
    return min(total, -(-total // (2 * align)) * align)


def _bounds(total: int, cut: int, ranks: int, nano_batches: int, align: int) -> list[np.ndarray]:
    """Returns [R + 1] bounds of each nano-batch: rank r gets the tokens [bounds[r], bounds[r + 1])."""
    return [_even_bounds(tokens, ranks, align) for tokens in ((total,) if nano_batches == 1 else (cut, total - cut))]


def _even_bounds(tokens: int, ranks: int, align: int) -> np.ndarray:
    """Returns [R + 1] bounds. Example: 10 tokens for 3 ranks in multiples of 2 are cut at 0, 2, 6 and 10."""
    return np.minimum(np.arange(ranks + 1) * -(-tokens // align) // ranks * align, tokens)


def _cut_at_ranks(stream: Stream, bounds: np.ndarray) -> tuple[Shards, np.ndarray]:
    """Lays ranges end to end on ranks, and cuts them at ``bounds``; returns shards, and [R] rows per rank."""
    placed, rank = laid_end_to_end(stream, np.diff(bounds))
    own = placed.stop - placed.start
    row = np.cumsum(own) - own - bounds[rank]
    rows = np.bincount(rank, weights=own, minlength=len(bounds) - 1).astype(np.int64)
    return Shards(placed.document, placed.start, placed.stop, rank, row), rows


def _in_shares(
    length: np.ndarray, ranks: int, nano_batches: int, align: int, cost: CostModel, ranks_per_node: int, lean: bool
) -> list[tuple[Shards, np.ndarray]] | None:
    """Places documents by their work in ping and pong together, as "spread" does.

    Returns for each nano-batch the shards, and [R] rows per rank; None if no room is found for a document."""
    if not len(length):
        return None
    total = int(length.sum())
    bounds = _bounds(total, _half(total, align), ranks, nano_batches, align)
    budgets = [np.diff(bound) for bound in bounds]
    node = np.arange(ranks) // (ranks_per_node or ranks)
    work = work_of(np.zeros_like(length), length, ranks, cost)
    found = None
    for in_pong in (True, False) if lean else (False,):
        dealt = deal(length, np.sum(budgets, axis=0), work, node, len(budgets), lean=in_pong)
        found = home_rows(length, dealt, budgets, work, node)
        if found is not None:
            break
    if found is None:
        return None
    goes_on = np.ones(len(length), bool)
    for stream, _ in found:
        goes_on &= np.bincount(stream.document, minlength=len(length)) > 0
    return [_in_rows(stream, rank, goes_on, bound) for (stream, rank), bound in zip(found, bounds, strict=True)]


def _in_rows(ranges: Stream, rank: np.ndarray, goes_on: np.ndarray, bounds: np.ndarray) -> tuple[Shards, np.ndarray]:
    """Numbers the rows of placed ranges on their ranks; returns the shards, and [R] rows per rank.

    Documents for which ``goes_on`` [D] is true come last on each rank. In ping, these must be the documents that go on
    in pong: :func:`_layout` relies on it."""
    order = order_by(rank, goes_on[ranges.document].astype(np.int64), ranges.document, ranges.start)
    document, start, stop, rank = (x[order] for x in (ranges.document, ranges.start, ranges.stop, rank))
    row = np.cumsum(stop - start) - (stop - start) - bounds[rank]
    return Shards(document, start, stop, rank, row), np.diff(bounds)


def _place_whole(
    length: np.ndarray,
    ranks: int,
    nano_batches: int,
    rank_of: np.ndarray,
    dealing: Dealing,
    work: np.ndarray | None = None,
) -> list[tuple[Shards, np.ndarray]]:
    nothing = Stream(*(np.zeros(0, np.int64),) * 3)
    return _dealt_at_home(length, ranks, nano_batches, rank_of, nothing, nothing.document, dealing, work=work)


def _fill_whole(
    length: np.ndarray, ranks: int, nano_batches: int, align: int, cost: CostModel, dealing: Dealing
) -> list[tuple[Shards, np.ndarray]]:
    room = np.diff(_even_bounds(int(length.sum()), ranks, align))
    if len(length) and length.max() > room.max():
        raise PlanError(
            f"A document of {int(length.max()):,} tokens does not stay whole on ranks of {int(room.max()):,}; choose "
            "another placement."
        )
    work = cost.per_direction("both", length, length).sum(axis=0)
    rank_of, rest, rank_of_rest = whole_documents(length, room, work)
    if align == 1:
        # Swaps begin with every document on one rank; a cut one counts as on the rank that has its first piece.
        begins = rank_of.copy()
        begins[rest.document[::-1]] = rank_of_rest[::-1]
        uncut = swapped(length, work, begins, ranks, OF_RANKS)
        if uncut is not None:
            return _place_whole(length, ranks, nano_batches, uncut, dealing, work)
    return _dealt_at_home(length, ranks, nano_batches, rank_of, rest, rank_of_rest, dealing, align)


def _dealt_at_home(
    length: np.ndarray,
    ranks: int,
    nano_batches: int,
    rank_of: np.ndarray,
    rest: Stream,
    rank_of_rest: np.ndarray,
    dealing: Dealing,
    align: int = 1,
    work: np.ndarray | None = None,
) -> list[tuple[Shards, np.ndarray]]:
    """Deals each rank's whole documents to the nano-batches. Pieces of cut documents go to the last nano-batch.

    ``rank_of`` [D] is the rank of each document that is whole on one rank, and -1 for cut documents. ``rest`` has the
    N pieces of cut documents, and ``rank_of_rest`` [N] their ranks. With ``work`` [D], the attention work of each
    document, swaps try to deal a rank's documents so that none is cut between ping and pong."""
    parts: list[list[Shards]] = [[] for _ in range(nano_batches)]
    rows = [np.zeros(ranks, np.int64) for _ in range(nano_batches)]
    ahead = 0.0  # query-key pairs of ping minus those of pong, on the ranks dealt so far
    for rank in range(ranks):
        mine, pieces = np.flatnonzero(rank_of == rank), np.flatnonzero(rank_of_rest == rank)
        if nano_batches == 2 and dealing != "in_order":
            mine = dealt_evenly(length, mine, ping_first=ahead <= 0)
        # Ping gets about half of the rank's tokens.
        tokens, more = int(length[mine].sum()), int((rest.stop - rest.start)[pieces].sum())
        cut = without_short_tail(length, mine, min(-(-(tokens + more) // 2), tokens)) // align * align
        halves = _uncut_halves(length, work, mine, cut) if work is not None and nano_batches == 2 else None
        streams = halves or streams_of(length, mine, nano_batches, cut)
        streams[-1] = Stream(
            np.concatenate((streams[-1].document, rest.document[pieces])),
            np.concatenate((streams[-1].start, rest.start[pieces])),
            np.concatenate((streams[-1].stop, rest.stop[pieces])),
        )
        for nano, stream in enumerate(streams):
            own = stream.stop - stream.start
            row = np.cumsum(own) - own
            parts[nano].append(Shards(stream.document, stream.start, stream.stop, np.full(len(own), rank), row))
            rows[nano][rank] = own.sum()
            ahead += (1 - 2 * nano) * float(range_pairs(stream.start, stream.stop).sum())
    return [
        (Shards(*(np.concatenate(column) for column in zip(*(s.columns() for s in part), strict=True))), count)
        for part, count in zip(parts, rows, strict=True)
    ]


def _uncut_halves(length: np.ndarray, work: np.ndarray, mine: np.ndarray, cut: int) -> list[Stream] | None:
    """Deals a rank's documents ``mine`` to ping and pong without a cut, so that each has about half of the tokens.

    Returns None if swaps find no way.

    In each nano-batch documents are in ascending order, and so are a server's tasks. So a rank that serves its own
    documents need not copy rows of q, k and v."""
    begins = np.cumsum(length[mine]) - length[mine]
    nano = swapped(length[mine], work[mine], (begins >= cut).astype(np.int64), 2, OF_NANO_BATCHES)
    if nano is None:
        return None
    return [Stream(own, np.zeros_like(own), length[own]) for own in (np.sort(mine[nano == each]) for each in (0, 1))]


def _sorted(shards: Shards) -> Shards:
    order = order_by(shards.document, shards.start)
    return Shards(*(column[order] for column in shards.columns()))


def _layout(documents: int, ranks: int, shards: Shards, rows: np.ndarray, previous: Layout | None) -> Layout:
    """Returns the layout of one nano-batch.

    The k,v rows are the rows of this nano-batch, and *carried* rows: the rows of the same documents in the ``previous``
    nano-batch. Carried rows stay on their ranks."""
    q = _sorted(shards)
    first = np.zeros(documents, np.int64)
    last = np.zeros(documents, np.int64)
    # In reverse order, the last value that is assigned is each document's first start.
    first[q.document[::-1]] = q.start[::-1]
    last[q.document] = q.stop
    carried_rows = np.zeros(ranks, np.int64)
    kv = q
    if previous is not None:
        split = np.flatnonzero(first > 0)
        head = np.isin(previous.q.document, split)
        np.add.at(carried_rows, previous.q.rank[head], (previous.q.stop - previous.q.start)[head])
        # On each rank of the previous nano-batch, documents that go on in this one come last. The rows before them,
        # "skipped", are not carried. Carried rows are numbered from 0, and this nano-batch's rows follow.
        skipped = previous.q_rows - carried_rows
        document, start, stop, rank, row = (column[head] for column in previous.q.columns())
        carried = (document, start, stop, rank, row - skipped[rank])
        own = (q.document, q.start, q.stop, q.rank, q.row + carried_rows[q.rank])
        kv = _sorted(Shards(*(np.concatenate(pair) for pair in zip(carried, own, strict=True))))
    return Layout(ranks, first, last, q, kv, rows, carried_rows)
