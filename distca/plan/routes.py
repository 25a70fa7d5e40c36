"""Routes: one rank's part of a plan, as exchanges of rows and the tasks' regions in them.

Attention kernels read one region [first key, stop) of k,v rows per task, in task order. The rows of a context
(``plan.py``) travel to a server once, into its buffer, and are kept there, for the next nano-batch too. A server whose
tasks share rows copies them to one region per task, only while it computes. Between nodes of several ranks, rows travel
to each node once and on inside it: in two exchanges, the second of which is the *relay* (``network.py``).

Example: a server has the tasks [2, 4) and [6, 7) of a document at another home. Its buffer gets k,v rows [0, 7) once.
The first task's region is a copy of rows [0, 4), the second's of rows [0, 7).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from distca.errors import PlanError
from distca.plan.exchanges import Exchanges, Pieces, RowExchange, Segments
from distca.plan.network import Links
from distca.plan.plan import Plan
from distca.plan.tasks import Tasks


@dataclass(frozen=True)
class Route:
    """One rank's part of a plan.

    Attributes:
        rank: this rank.
        ranks: size of the server pool.
        q: exchange of query rows (and of o, its reverse).
        kv: exchange of key and value rows; with a relay, of those that come straight from home.
        relay: exchange of the rows that gateways hand on to servers of their nodes. It comes after ``kv``, on the way
            back before it. Gateways stand in for home ranks, and their server buffers for home tensors. None where no
            row of the pool takes two hops.
        cu_q: [T+1] int32 borders of the tasks' query rows in the server buffer.
        cu_kv: [T+1] int32 borders of the tasks' k,v regions.
        kind: [T] int64 number of every task's kind of layer; tasks of one kind may stand in several places.
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
        """Longest query range of a task; 0 without tasks."""
        return int(np.diff(self.cu_q).max(initial=0))

    @property
    def max_kv(self) -> int:
        """Longest context of a task; 0 without tasks."""
        return int(np.diff(self.cu_kv).max(initial=0))


def route(plan: Plan, rank: int, links: Links | None = None) -> Route:
    """The part of ``plan`` that concerns ``rank``; ``links`` as in :class:`Routes`.

    Raises:
        PlanError: the plan was made for fewer ranks.
    """
    return Routes(plan, links, only=rank)[rank]


class Routes(Sequence[Route]):
    """The routes of all ranks of a plan, found in one pass; each is put together when it is asked for.

    Args:
        plan: over R ranks.
        links: which ranks share a node; key and value rows travel once to each node. None where all share one.
        only: the one rank that is going to be asked for, if there is no other; that takes a fraction of the time.
    """

    def __init__(self, plan: Plan, links: Links | None = None, only: int | None = None) -> None:
        tasks, layout = plan.tasks, plan.layout
        self._ranks = layout.ranks
        self._bounds = np.searchsorted(tasks.server, np.arange(layout.ranks + 1))
        q_rows = tasks.stop - tasks.start
        self._q_ends, self._kv_ends = np.cumsum(q_rows), np.cumsum(plan.region_rows)
        self._kind = plan.kind_of_task
        contexts = plan.contexts
        last, rows = contexts.last, contexts.rows
        last_bounds = np.searchsorted(last.server, np.arange(layout.ranks + 1))
        self._received_rows = np.diff(np.append(0, np.cumsum(rows))[last_bounds])
        q_offset = _offsets_within_server(tasks, self._bounds, q_rows)
        kv_offset = _offsets_within_server(last, last_bounds, rows)
        q, _ = Pieces.of(plan.q_reads, tasks.start, q_offset, layout.q)
        kv, relay = Pieces.of(plan.kv_reads, contexts.begin, kv_offset, layout.kv, links, layout.ranks)
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
        """The route of a rank.

        Raises:
            PlanError: the plan was made for fewer ranks.
        """
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
    """[high - low + 1] int32 borders of the tasks from ``low`` on, counted from the first."""
    before = ends[low - 1] if low else 0
    return np.concatenate(([0], ends[low:high] - before)).astype(np.int32)


def _offsets_within_server(tasks: Tasks, bounds: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """[T] first row of each task in its server's buffer, where tasks lie one after the other; server r has the tasks
    [bounds[r], bounds[r + 1])."""
    begins = np.concatenate(([0], np.cumsum(rows)))
    return begins[:-1] - begins[bounds[tasks.server]]


def _copies(plan: Plan, kv_offset: np.ndarray, bounds: np.ndarray) -> tuple[Segments, Segments]:
    """Returns the copies to the regions of tasks: from the server buffer, and from that of the nano-batch before.

    Only servers need copies whose tasks share rows, or have some from the nano-batch before; on the others the buffer
    has the regions. ``peer`` of the segments is the server here.

    Args:
        plan: over all servers.
        kv_offset: [L] first row of each context in its server's buffer.
        bounds: server r has the tasks [bounds[r], bounds[r + 1]).
    """
    # A region is what the server kept of its context (a copy from "before"), then what arrived (a copy from "source").
    # Where consecutive contexts have one task each and nothing was kept, their copies are joined into one.
    tasks, contexts, context = plan.tasks, plan.contexts, plan.contexts.of_task
    alone = np.append(context[1:] != context[:-1], True)[: len(tasks)]  # the last of its context
    kept = contexts.begin - contexts.first
    shares = np.bincount(tasks.server[~alone | (kept[context] > 0)], minlength=len(bounds)) > 0
    chosen = np.flatnonzero(shares[tasks.server])
    target = _offsets_within_server(tasks, bounds, plan.region_rows)[chosen]
    context, alone, server = context[chosen], alone[chosen], tasks.server[chosen]
    begin, kept = contexts.begin[context], kept[context]
    first = np.maximum(plan.first_key[chosen], begin)
    rows = tasks.stop[chosen] - first
    some = np.flatnonzero(kept)
    before = Segments(server[some], contexts.at[context[some]], target[some], kept[some])
    joins = alone[1:] & alone[:-1] & (kept[1:] == 0) & (server[1:] == server[:-1])
    heads = np.flatnonzero(np.append(True, ~joins)[: len(chosen)])
    rows = np.add.reduceat(rows, heads) if len(heads) else rows
    source = kv_offset[context] + first - begin
    return Segments(server[heads], source[heads], (target + kept)[heads], rows), before
