"""How rows of one kind (q, or k and v) get from home ranks to servers: what every rank sends, receives and keeps.

Rows of a shard are contiguous, so a transfer is a list of row ranges, its *segments*, and nothing is indexed by token.
The reverse of an exchange (o back home, gradients back home) has the same segments, with source and destination
exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.plan.layout import Shards
from distca.plan.network import Links, Reads
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

    @staticmethod
    def none() -> Segments:
        """No segments."""
        empty = np.zeros(0, np.int64)
        return Segments(empty, empty, empty, empty)

    @property
    def total(self) -> int:
        return int(self.rows.sum())

    def per_peer(self, ranks: int) -> np.ndarray:
        """[ranks] rows exchanged with each peer."""
        return np.bincount(self.peer, weights=self.rows, minlength=ranks).astype(np.int64)

    def take(self, chosen: np.ndarray | slice) -> Segments:
        """The segments that a slice or indices choose."""
        return Segments(self.peer[chosen], self.source[chosen], self.destination[chosen], self.rows[chosen])

    def between(self, low: int, high: int) -> Segments:
        """The segments from index ``low`` up to ``high``."""
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
        repeat: copies from the server buffer to all tasks' regions, made while the server computes; their gradients are
            added up before they go home. Empty where the buffer has the regions already: no two tasks share rows, and
            none have rows from the nano-batch before.
        before: copies from the server buffer of the nano-batch before; their gradients are added to that one's.
        travelling: rows that travel between any two ranks of the pool; the same on every rank, so all of them know when
            an exchange can be left out.
        ahead_at_server: [R] int64 rows that each server receives from home ranks below this one. A receiver packs rows
            by (sender, order of its segments), so this rank's rows begin there.
        ahead_at_home: [R] int64 rows that each home rank gets back from servers below this one.
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
class Pieces:
    """Row ranges that servers read, for all ranks. Array legend: N pieces; all arrays are int64.

    Attributes:
        sender: [N] rank that has the rows.
        server: [N] rank that reads them; it may be the sender.
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
    ) -> tuple[Pieces, Pieces]:
        """Returns the rows of ``reads`` that come from home, and those that a gateway hands on.

        Args:
            reads: of tasks.
            begin: [T] first row that each task reads.
            offset: [T] where that row lands in the server's buffer.
            shards: where rows live.
            links: as in :meth:`distca.plan.network.Reads.in_hops`.
            ranks: R.
        """
        start = np.maximum(begin[reads.task], shards.start[reads.shard])
        source = shards.row[reads.shard] + start - shards.start[reads.shard]
        destination = offset[reads.task] + start - begin[reads.task]
        at, on, by = reads.in_hops(links, ranks)
        home, server, rows = reads.home, reads.server, reads.rows
        return (
            Pieces(home[at], server[at], source[at], destination[at], rows[at]),
            Pieces(server[by], server[on], destination[by], destination[on], rows[on]),
        )


class Exchanges:
    """The exchanges of one kind of row, for all ranks.

    Args:
        pieces: what every server reads.
        source_rows: [R] rows of every sender's tensor.
        only: the one rank that is going to be asked for, which saves time; None for all.
    """

    def __init__(self, pieces: Pieces, source_rows: np.ndarray, only: int | None) -> None:
        ranks = len(source_rows)
        home, server, rows = pieces.sender, pieces.server, pieces.rows
        source, destination = pieces.source, pieces.destination
        self._ranks, self._source_rows = ranks, source_rows
        # Senders look segments up by home rank, then server; receivers by server, then home rank.
        self._by_home = _Grouped(home, Segments(server, source, destination, rows), ranks, only)
        self._by_server = _Grouped(server, Segments(home, source, destination, rows), ranks, only)
        away = np.flatnonzero(home != server)
        home, server, rows = home[away], server[away], rows[away]
        self._to_server = _Arrivals(home, server, rows, ranks, only)
        self._to_home = _Arrivals(server, home, rows, ranks, only)

    def of(self, rank: int, destination_rows: int, repeat: Segments, before: Segments) -> RowExchange:
        """The exchange of one rank, whose server buffer has ``destination_rows``."""
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
    """The segments of all ranks by their ``owner`` [N], the rank at this end; those that continue each other are
    joined.

    Example: rows 0 to 3 go to rows 10 to 13 of a peer, and rows 4 and 5 to its rows 14 and 15: one segment of 6
    rows."""

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
        """Returns the rank's segments with other ranks, and those with itself."""
        mine = self._segments.between(*self._bounds[rank : rank + 2].tolist())
        low, high = np.searchsorted(mine.peer, (rank, rank + 1)).tolist()
        others = np.concatenate((np.arange(low), np.arange(high, len(mine))))
        return (mine.take(others) if high > low else mine), mine.between(low, high)


class _Arrivals:
    """Rows that reach other ranks in one direction, [N] pieces with a sender and a receiver each.

    Attributes:
        total: rows at all receivers together.
        most: most rows at one receiver.
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
        """[R] int64 rows that each receiver gets from senders below ``rank``."""
        below = slice(len(self._sender) if self._all_below else int(np.searchsorted(self._sender, rank)))
        return np.bincount(self._receiver[below], self._rows[below], self._ranks).astype(np.int64)
