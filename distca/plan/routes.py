"""Routes: which rows a rank sends and receives by a plan, and which k,v rows the rank's tasks read.

- A *row* is one token's q, or its k and v. A row's *home* is the rank that computes the token's linear layers.
- A *server* is a rank that computes attention.
- A *task* is a range of query rows of one document on one server.
- A *region* is the range of k,v rows that a kernel reads for one task.
- A *context* is the union of overlapping regions of one document on one server (``plan.py``).

Example: a server has the tasks [2, 4) and [6, 7) of a document. The server's buffer gets the context's k,v rows [0, 7)
once. The regions are copies of the rows [0, 4) and [0, 7).

T tasks, L contexts, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from distca.errors import PlanError
from distca.plan.exchanges import Exchanges, ReadRanges, RowExchange, Segments
from distca.plan.network import Links
from distca.plan.plan import Plan
from distca.plan.tasks import Tasks


@dataclass(frozen=True)
class Route:
    """One rank's part of a plan.

    Attributes:
        q: exchange of query rows; attention's outputs return by the reverse exchange.
        kv: exchange of key and value rows from homes.
        relay: exchange that sends key and value rows on inside a node. Its senders are *gateways*, servers that got the
            rows from another node. It runs after ``kv``. Gradients return by the reverse of ``relay``, and then by that
            of ``kv``. None if no rank is a gateway.
        cu_q: [T+1] int32 borders of the tasks' query rows in the server buffer.
        cu_kv: [T+1] int32 borders of the tasks' regions, laid end to end.
        kind: [T] int64 index of each task's kind of layer in the plan's ``windows``, which have one entry per kind.
    """

    rank: int
    ranks: int
    q: RowExchange
    kv: RowExchange
    relay: RowExchange | None
    cu_q: np.ndarray
    cu_kv: np.ndarray
    kind: np.ndarray

    @property
    def max_q(self) -> int:
        """Returns the rows of the longest query range of a task; 0 without tasks."""
        return int(np.diff(self.cu_q).max(initial=0))

    @property
    def max_kv(self) -> int:
        """Returns the rows of the longest region of a task; 0 without tasks."""
        return int(np.diff(self.cu_kv).max(initial=0))


def route(plan: Plan, rank: int, links: Links | None = None) -> Route:
    """Returns the part of ``plan`` that concerns ``rank``.

    ``links`` says which ranks share a node, so that gateways can be chosen; None if all share one node.

    Raises:
        PlanError: the plan was made for fewer ranks.
    """
    return Routes(plan, links, only=rank)[rank]


class Routes(Sequence[Route]):
    """The routes of all ranks of a plan, each made on access.

    Args:
        links: as for :func:`route`.
        only: the only rank whose route will be asked for; None for any rank.
    """

    def __init__(self, plan: Plan, links: Links | None = None, only: int | None = None) -> None:
        tasks, layout = plan.tasks, plan.layout
        self._ranks = layout.ranks
        self._bounds = np.searchsorted(tasks.server, np.arange(layout.ranks + 1))
        # q_offset [T] and kv_offset [L]: first row of each task and of each context in its server's buffer. Server r
        # has the tasks [_bounds[r], _bounds[r + 1]) and the contexts [last_bounds[r], last_bounds[r + 1]).
        q_rows = tasks.stop - tasks.start
        self._q_ends, self._kv_ends = np.cumsum(q_rows), np.cumsum(plan.region_rows)
        self._kind = plan.kind_of_task
        contexts = plan.contexts
        last, rows = contexts.last, contexts.rows
        last_bounds = np.searchsorted(last.server, np.arange(layout.ranks + 1))
        self._received_rows = np.diff(np.append(0, np.cumsum(rows))[last_bounds])
        q_offset = _offsets_within_server(tasks, self._bounds, q_rows)
        kv_offset = _offsets_within_server(last, last_bounds, rows)
        q, _ = ReadRanges.of(plan.q_reads, tasks.start, q_offset, layout.q)
        kv, relay = ReadRanges.of(plan.kv_reads, contexts.begin, kv_offset, layout.kv, links, layout.ranks)
        self._q = Exchanges(q, layout.q_rows, only)
        self._kv = Exchanges(kv, layout.kv_rows, only)
        self._relay = Exchanges(relay, self._received_rows, only) if len(relay.rows) else None
        self._repeats, self._before = _copies(plan, kv_offset, self._bounds)
        self._repeat_bounds, self._before_bounds = (
            np.searchsorted(copies.peer, np.arange(layout.ranks + 1)) for copies in (self._repeats, self._before)
        )

    def __len__(self) -> int:
        return self._ranks

    @overload
    def __getitem__(self, rank: int) -> Route: ...
    @overload
    def __getitem__(self, rank: slice) -> list[Route]: ...
    def __getitem__(self, rank: int | slice) -> Route | list[Route]:
        if isinstance(rank, slice):
            return [self[each] for each in range(*rank.indices(self._ranks))]
        if not 0 <= rank < self._ranks:
            raise PlanError(f"Rank {rank} has no part in the plan, which was made for {self._ranks} ranks; plan again.")
        low, high = self._bounds[rank : rank + 2].tolist()
        cu_q, cu_kv = (_borders(ends, low, high) for ends in (self._q_ends, self._kv_ends))
        repeat = self._repeats.between(*self._repeat_bounds[rank : rank + 2].tolist())
        before = self._before.between(*self._before_bounds[rank : rank + 2].tolist())
        received_rows = int(self._received_rows[rank])
        return Route(
            rank=rank,
            ranks=self._ranks,
            q=self._q.of(rank, int(cu_q[-1]), Segments.none(), Segments.none()),
            kv=self._kv.of(rank, received_rows, repeat, before),
            relay=None
            if self._relay is None
            else self._relay.of(rank, received_rows, Segments.none(), Segments.none()),
            cu_q=cu_q,
            cu_kv=cu_kv,
            kind=self._kind[low:high],
        )

    def __iter__(self) -> Iterator[Route]:
        return (self[rank] for rank in range(self._ranks))


def _borders(ends: np.ndarray, low: int, high: int) -> np.ndarray:
    """Returns int32 borders of the tasks [low, high). Example: ends 2, 5, 9 with low 1 and high 3 give 0, 3, 7."""
    before = ends[low - 1] if low else 0
    return np.concatenate(([0], ends[low:high] - before)).astype(np.int32)


def _offsets_within_server(tasks: Tasks, bounds: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns [T] first row of each task in its server's buffer, in which tasks follow each other.

    Task t takes rows[t] rows. Server r has the tasks [bounds[r], bounds[r + 1])."""
    begins = np.concatenate(([0], np.cumsum(rows)))
    return begins[:-1] - begins[bounds[tasks.server]]


def _copies(plan: Plan, kv_offset: np.ndarray, bounds: np.ndarray) -> tuple[Segments, Segments]:
    """Returns the copies that fill regions: from this nano-batch's buffers, and from those of the previous nano-batch.

    If a micro-batch is computed in two parts, its *nano-batches*, the second may read k,v rows that a server's buffer
    holds from the first. A server copies nothing if its tasks share no rows, and need no rows from the previous part.
    ``peer`` is the server of each copy. ``Routes.__init__`` explains the arguments."""
    # A region consists of "kept" rows from the previous nano-batch, and then of rows from the server's buffer. Two
    # copies become one if their rows follow each other in the buffer and in the regions. That is so if each copy is for
    # the last task of its context ("is_last"), and the second region has no kept rows.
    tasks, contexts, context = plan.tasks, plan.contexts, plan.contexts.of_task
    is_last = np.append(context[1:] != context[:-1], True)[: len(tasks)]
    kept = contexts.begin - contexts.first
    copies = np.bincount(tasks.server[~is_last | (kept[context] > 0)], minlength=len(bounds)) > 0
    chosen = np.flatnonzero(copies[tasks.server])
    target = _offsets_within_server(tasks, bounds, plan.region_rows)[chosen]
    context, is_last, server = context[chosen], is_last[chosen], tasks.server[chosen]
    begin, kept = contexts.begin[context], kept[context]
    first = np.maximum(plan.first_key[chosen], begin)
    rows = tasks.stop[chosen] - first
    some = np.flatnonzero(kept)
    before = Segments(server[some], contexts.at[context[some]], target[some], kept[some])
    joins = is_last[1:] & is_last[:-1] & (kept[1:] == 0) & (server[1:] == server[:-1])
    heads = np.flatnonzero(np.append(True, ~joins)[: len(chosen)])
    rows = np.add.reduceat(rows, heads) if len(heads) else rows
    source = kv_offset[context] + first - begin
    return Segments(server[heads], source[heads], (target + kept)[heads], rows), before
