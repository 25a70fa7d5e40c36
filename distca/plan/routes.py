"""Routes: one rank's part of a plan, as row ranges to send, receive and keep.

Rows of a shard are contiguous, so a transfer is a list of segments and nothing is indexed by token. The reverse of a
route (o back home, gradients back home) is the same list with source and destination exchanged.

Varlen kernels read one region [first key, stop) of k,v rows per task, in task order. The rows of a context travel to a
server once, and are kept so, for the half that comes next too. Only while it computes does a server whose tasks share
rows copy them to a region per task. Between nodes of several ranks they travel to each node
once and on inside it: two exchanges, the second of which is the *relay* (``hops.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from distca.errors import PlanError
from distca.plan.hops import Reads
from distca.plan.layout import Shards
from distca.plan.plan import Plan
from distca.plan.scheduler.network_cost import Links
from distca.plan.sorting import order_by
from distca.plan.tasks import Tasks


@dataclass(frozen=True)
class Segments:
    """Row ranges that move, sorted by (peer, destination). Array legend: N segments; all arrays are int64.

    Attributes:
        peer: [N] the rank at the other end.
        source: [N] first row in the sender's tensor.
        destination: [N] first row in the receiver's tensor.
        rows: [N] number of rows.
    """

    peer: np.ndarray
    source: np.ndarray
    destination: np.ndarray
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.peer)

    @property
    def total(self) -> int:
        return int(self.rows.sum())

    def per_peer(self, ranks: int) -> np.ndarray:
        """[ranks] rows exchanged with each peer."""
        return np.bincount(self.peer, weights=self.rows, minlength=ranks).astype(np.int64)

    def take(self, chosen: np.ndarray | slice) -> Segments:
        """Those of a slice or of indices."""
        return Segments(self.peer[chosen], self.source[chosen], self.destination[chosen], self.rows[chosen])

    def between(self, low: int, high: int) -> Segments:
        """Those from index ``low`` up to ``high``."""
        return self.take(slice(low, high))


@dataclass(frozen=True)
class RowExchange:
    """How one kind of row (q or k,v) gets from home ranks to servers, seen from one rank.

    Attributes:
        source_rows: rows of this rank's home tensor.
        destination_rows: rows of this rank's server buffer, each of which arrives once.
        send: home rows of this rank that other servers need.
        receive: rows that other homes send to this server.
        keep: home rows that this rank's own server needs.
        repeat: copies from the server buffer to the tasks' regions, all of them, made while the server computes; their
            gradients are added up before the return. Empty where no two tasks share rows and none are of the half
            before: the buffer has the regions.
        before: the same from the server buffer of the half before; their gradients are added to that half's.
        travelling: rows that travel between any two ranks of the pool; the same on every rank, so all of them know when
            an exchange can be left out.
        ahead_at_server: [R] int64: of the rows that each server receives from other ranks, those of home ranks below
            this one. A receiver packs rows by (sender, order of its segments), so this rank's begin there.
        ahead_at_home: [R] int64: the same for the way back: of the rows that each home rank gets back from other ranks,
            those of servers below this one.
        most_to_server: most rows that any one server receives from others; the same on every rank.
        most_to_home: most rows that any one home rank gets back from others; the same on every rank.
    """

    source_rows: int
    destination_rows: int
    send: Segments
    receive: Segments
    keep: Segments
    repeat: Segments
    before: Segments
    travelling: int
    ahead_at_server: np.ndarray
    ahead_at_home: np.ndarray
    most_to_server: int
    most_to_home: int


@dataclass(frozen=True)
class Route:
    """One rank's part of a plan.

    Attributes:
        rank: this rank.
        ranks: size of the server pool.
        q: exchange of query rows (and of o, its reverse).
        kv: exchange of key and value rows; with a relay, of those that come straight from home.
        relay: what goes on from servers to others of their nodes, after ``kv`` and before it on the way back: gateways
            stand in for home ranks, and server buffers for home tensors. None where no row of the pool takes two hops.
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
    """The part of ``plan`` that concerns ``rank``; ``links`` as of :class:`Routes`.

    Raises:
        PlanError: the plan was made for fewer ranks.
    """
    return Routes(plan, links, only=rank)[rank]


class Routes(Sequence[Route]):
    """The routes of all ranks of a plan, found in one pass; each is put together when it is asked for.

    Args:
        plan: over R ranks.
        links: which ranks share a node, to each of which key and value rows travel once; None for all.
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
        q, _ = _Pieces.of(plan.q_reads, tasks.start, q_offset, layout.q)
        kv, relay = _Pieces.of(plan.kv_reads, contexts.begin, kv_offset, layout.kv, links, layout.ranks)
        self._q = _Exchanges(q, layout.q_rows, only)
        self._kv = _Exchanges(kv, layout.kv_rows, only)
        self._relay = _Exchanges(relay, self._received_rows, only) if len(relay.rows) else None
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
            q=self._q.of(rank, int(cu_q[-1]), _none(), _none()),
            kv=self._kv.of(rank, received_rows, repeat, before),
            relay=None if self._relay is None else self._relay.of(rank, received_rows, _none(), _none()),
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


def _none() -> Segments:
    empty = np.zeros(0, np.int64)
    return Segments(empty, empty, empty, empty)


def _offsets_within_server(tasks: Tasks, bounds: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """[T] first row of each task in its server's buffer; those of server r are tasks [bounds[r], bounds[r + 1])."""
    begins = np.concatenate(([0], np.cumsum(rows)))
    return begins[:-1] - begins[bounds[tasks.server]]


def _copies(plan: Plan, kv_offset: np.ndarray, bounds: np.ndarray) -> tuple[Segments, Segments]:
    """Copies to the regions of all tasks of servers [peer] where some share rows or have some of the half before: from
    rows that arrived, those of contexts at ``kv_offset`` [L], and from the half before. Contexts of one task, one after
    the other, are one copy."""
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


@dataclass(frozen=True)
class _Pieces:
    """Row ranges that servers read, of all ranks. Array legend: N pieces; all arrays are int64.

    Attributes:
        sender: [N] rank that has the rows.
        server: [N] rank that reads them, may be the same.
        source: [N] first row in the sender's tensor.
        destination: [N] first row in the server's buffer.
        rows: [N] number of rows.
    """

    sender: np.ndarray
    server: np.ndarray
    source: np.ndarray
    destination: np.ndarray
    rows: np.ndarray

    @staticmethod
    def of(
        reads: Reads, begin: np.ndarray, offset: np.ndarray, shards: Shards, links: Links | None = None, ranks: int = 1
    ) -> tuple[_Pieces, _Pieces]:
        """Those of ``reads`` that come from home, and those that a gateway hands on. Tasks read from [T] ``begin``, and
        those rows land at [T] ``offset``."""
        start = np.maximum(begin[reads.task], shards.start[reads.shard])
        source = shards.row[reads.shard] + start - shards.start[reads.shard]
        destination = offset[reads.task] + start - begin[reads.task]
        at, on, by = reads.in_hops(links, ranks)
        home, server, rows = reads.home, reads.server, reads.rows
        return (
            _Pieces(home[at], server[at], source[at], destination[at], rows[at]),
            _Pieces(server[by], server[on], destination[by], destination[on], rows[on]),
        )


class _Exchanges:
    """The exchange of one kind of row, of all ranks.

    Args:
        pieces: what every server reads.
        source_rows: [R] rows of every sender's tensor.
        only: the one rank that is going to be asked for, or None.
    """

    def __init__(self, pieces: _Pieces, source_rows: np.ndarray, only: int | None) -> None:
        ranks = len(source_rows)
        home, server, rows = pieces.sender, pieces.server, pieces.rows
        source, destination = pieces.source, pieces.destination
        self._ranks, self._source_rows = ranks, source_rows
        # By home rank and server for those who send, by server and home rank for those who receive.
        self._by_home = _Grouped(home, Segments(server, source, destination, rows), ranks, only)
        self._by_server = _Grouped(server, Segments(home, source, destination, rows), ranks, only)
        away = np.flatnonzero(home != server)
        home, server, rows = home[away], server[away], rows[away]
        self._to_server = _Arrivals(home, server, rows, ranks, only)
        self._to_home = _Arrivals(server, home, rows, ranks, only)

    def of(self, rank: int, destination_rows: int, repeat: Segments, before: Segments) -> RowExchange:
        """That of one rank, whose server buffer has ``destination_rows``."""
        send, keep = self._by_home.of(rank)
        receive, _ = self._by_server.of(rank)
        return RowExchange(
            int(self._source_rows[rank]),
            destination_rows,
            send,
            receive,
            keep,
            repeat,
            before,
            self._to_server.total,
            self._to_server.ahead(rank),
            self._to_home.ahead(rank),
            self._to_server.most,
            self._to_home.most,
        )


class _Grouped:
    """[N] segments of all ranks by ``owner`` [N], the rank at this end, those that continue each other joined."""

    def __init__(self, owner: np.ndarray, segments: Segments, ranks: int, only: int | None) -> None:
        if only is None:
            order = order_by(owner, segments.peer, segments.destination)
        else:
            order = np.flatnonzero(owner == only)
            order = order[order_by(segments.peer[order], segments.destination[order])]
        owner, found = owner[order], segments.take(order)
        peer, source, destination, rows = found.peer, found.source, found.destination, found.rows
        joins = (
            (owner[1:] == owner[:-1])
            & (peer[1:] == peer[:-1])
            & (source[1:] == source[:-1] + rows[:-1])
            & (destination[1:] == destination[:-1] + rows[:-1])
        )
        heads = np.flatnonzero(np.append(True, ~joins)[: len(owner)])
        if len(heads):
            rows = np.add.reduceat(rows, heads)
        self._segments = Segments(peer[heads], source[heads], destination[heads], rows)
        self._bounds = np.searchsorted(owner[heads], np.arange(ranks + 1))

    def of(self, rank: int) -> tuple[Segments, Segments]:
        """The rank's segments with others, and with itself."""
        mine = self._segments.between(*self._bounds[rank : rank + 2].tolist())
        low, high = np.searchsorted(mine.peer, (rank, rank + 1)).tolist()
        others = np.concatenate((np.arange(low), np.arange(high, len(mine))))
        return (mine.take(others) if high > low else mine), mine.between(low, high)


class _Arrivals:
    """Rows that reach other ranks in one direction, from [N] senders at [N] receivers.

    Attributes:
        total: of all.
        most: at one receiver.
    """

    def __init__(
        self, sender: np.ndarray, receiver: np.ndarray, rows: np.ndarray, ranks: int, only: int | None
    ) -> None:
        order = np.argsort(sender, kind="stable") if only is None else np.flatnonzero(sender < only)
        self._sender, self._receiver, self._rows = sender[order], receiver[order], rows[order]
        self._ranks, self._all_below = ranks, only is not None
        everything = np.bincount(receiver, rows, ranks)
        self.total, self.most = int(everything.sum()), int(everything.max())

    def ahead(self, rank: int) -> np.ndarray:
        """[R] int64: at each receiver, the rows of senders below ``rank``."""
        below = slice(len(self._sender) if self._all_below else int(np.searchsorted(self._sender, rank)))
        return np.bincount(self._receiver[below], self._rows[below], self._ranks).astype(np.int64)
