"""Routes: one rank's part of a plan, as row ranges to send, receive and keep.

Rows of a shard are contiguous, so a transfer is a list of segments and nothing is indexed by token. The reverse of a
route (o back home, gradients back home) is the same list with source and destination exchanged.

A server's k,v buffer holds one region [0, stop) per task, in task order, as varlen kernels read it. The rows of a
document travel to a server once, into the region of its last task there; regions of earlier tasks are copied from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.errors import PlanError
from distca.plan.layout import Shards, overlaps
from distca.plan.plan import Plan, Tasks
from distca.plan.sorting import order_by


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

    @staticmethod
    def merged(peer: np.ndarray, source: np.ndarray, destination: np.ndarray, rows: np.ndarray) -> Segments:
        """Sort by (peer, destination) and join segments that continue each other on both sides."""
        order = order_by(peer, destination)
        peer, source, destination, rows = (column[order] for column in (peer, source, destination, rows))
        if len(peer) == 0:
            return Segments(peer, source, destination, rows)
        joins = (
            (peer[1:] == peer[:-1])
            & (source[1:] == source[:-1] + rows[:-1])
            & (destination[1:] == destination[:-1] + rows[:-1])
        )
        heads = np.flatnonzero(np.append(True, ~joins))
        return Segments(peer[heads], source[heads], destination[heads], np.add.reduceat(rows, heads))


@dataclass(frozen=True)
class RowExchange:
    """How one kind of row (q or k,v) gets from home ranks to servers, seen from one rank.

    Attributes:
        source_rows: rows of this rank's home tensor.
        destination_rows: rows of this rank's server buffer.
        send: home rows of this rank that other servers need.
        receive: rows that other homes send to this server.
        keep: home rows that this rank's own server needs.
        repeat: copies inside the server buffer (source and destination both there), made after the rows arrived; their
            gradients are added up before the return.
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
        kv: exchange of key and value rows.
        cu_q: [T+1] int32 borders of the tasks' query rows in the server buffer.
        cu_kv: [T+1] int32 borders of the tasks' k,v regions.
    """

    rank: int
    ranks: int
    q: RowExchange
    kv: RowExchange
    cu_q: np.ndarray
    cu_kv: np.ndarray

    @property
    def max_q(self) -> int:
        """Longest query range of a task; 0 without tasks."""
        return int(np.diff(self.cu_q).max(initial=0))

    @property
    def max_kv(self) -> int:
        """Longest context of a task; 0 without tasks."""
        return int(np.diff(self.cu_kv).max(initial=0))


def route(plan: Plan, rank: int) -> Route:
    """The part of ``plan`` that concerns ``rank``.

    Raises:
        PlanError: the plan was made for fewer ranks.
    """
    if not 0 <= rank < plan.layout.ranks:
        raise PlanError(
            f"Rank {rank} has no part in the plan, which was made for {plan.layout.ranks} ranks; plan again."
        )
    tasks, layout = plan.tasks, plan.layout
    q_offset = _offsets_within_server(tasks, tasks.stop - tasks.start)
    kv_offset = _offsets_within_server(tasks, tasks.stop)
    last_on_server = tasks.last_on_server
    mine = np.flatnonzero(tasks.server == rank)
    return Route(
        rank=rank,
        ranks=layout.ranks,
        q=_exchange(tasks, tasks.start, q_offset, layout.q, rank, layout.q_rows, _none()),
        kv=_exchange(
            tasks.take(last_on_server),
            np.zeros(int(last_on_server.sum()), np.int64),
            kv_offset[last_on_server],
            layout.kv,
            rank,
            layout.kv_rows,
            _repeats(tasks, kv_offset, last_on_server, mine),
            destination_rows=int(tasks.stop[mine].sum()),
        ),
        cu_q=np.concatenate(([0], np.cumsum((tasks.stop - tasks.start)[mine]))).astype(np.int32),
        cu_kv=np.concatenate(([0], np.cumsum(tasks.stop[mine]))).astype(np.int32),
    )


def _none() -> Segments:
    empty = np.zeros(0, np.int64)
    return Segments(empty, empty, empty, empty)


def _offsets_within_server(tasks: Tasks, rows: np.ndarray) -> np.ndarray:
    """[T] first row of each task in its server's buffer; tasks are sorted by server."""
    ends = np.cumsum(rows)
    first = np.searchsorted(tasks.server, np.arange(int(tasks.server.max(initial=0)) + 1))
    return ends - rows - np.concatenate(([0], ends))[first][tasks.server]


def _exchange(
    tasks: Tasks,
    begin: np.ndarray,
    offset: np.ndarray,
    shards: Shards,
    rank: int,
    source_rows: np.ndarray,
    repeat: Segments,
    destination_rows: int | None = None,
) -> RowExchange:
    """Segments of the token ranges [begin, stop) of ``tasks`` whose first row lands at ``offset`` on the server.

    ``source_rows`` [R] are the rows of every rank's home tensor.
    """
    task, shard, rows = overlaps(tasks.document, begin, tasks.stop, shards)
    start = np.maximum(begin[task], shards.start[shard])
    home, server = shards.rank[shard], tasks.server[task]
    source = shards.row[shard] + start - shards.start[shard]
    destination = offset[task] + start - begin[task]

    def pick(chosen: np.ndarray, peer: np.ndarray) -> Segments:
        return Segments.merged(peer[chosen], source[chosen], destination[chosen], rows[chosen])

    sends = (home == rank) & (server != rank)
    receives = (server == rank) & (home != rank)
    keeps = (home == rank) & (server == rank)
    if destination_rows is None:
        destination_rows = int(rows[server == rank].sum())
    away = home != server
    to_server = _Arrivals.of(home[away], server[away], rows[away], rank, len(source_rows))
    to_home = _Arrivals.of(server[away], home[away], rows[away], rank, len(source_rows))
    return RowExchange(
        int(source_rows[rank]),
        destination_rows,
        pick(sends, server),
        pick(receives, home),
        pick(keeps, server),
        repeat,
        to_server.total,
        to_server.ahead,
        to_home.ahead,
        to_server.most,
        to_home.most,
    )


@dataclass(frozen=True)
class _Arrivals:
    """Rows that reach other ranks in one direction: in all, the most at one receiver, and at each receiver those of
    senders below one rank, ``ahead`` [R] int64."""

    total: int
    most: int
    ahead: np.ndarray

    @staticmethod
    def of(sender: np.ndarray, receiver: np.ndarray, rows: np.ndarray, rank: int, ranks: int) -> _Arrivals:
        everything = np.bincount(receiver, rows, ranks)
        below = sender < rank
        ahead = np.bincount(receiver[below], rows[below], ranks).astype(np.int64)
        return _Arrivals(int(everything.sum()), int(everything.max()), ahead)


def _repeats(tasks: Tasks, kv_offset: np.ndarray, last_on_server: np.ndarray, mine: np.ndarray) -> Segments:
    """Copies from the region of a document's last task on this server to those of its earlier tasks."""
    lasts = np.flatnonzero(last_on_server)
    earlier = mine[~last_on_server[mine]]
    source_task = lasts[np.searchsorted(lasts, earlier)]
    return Segments(tasks.server[earlier], kv_offset[source_task], kv_offset[earlier], tasks.stop[earlier])
