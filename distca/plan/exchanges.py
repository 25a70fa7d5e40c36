"""Exchanges of rows between ranks: the rows that each rank sends, receives and keeps for attention.

The *home* of a row is the rank that holds the row. A *server* is a rank that computes attention, for tasks: ranges of
query rows of one document. Rows of q go from homes to servers in one exchange, and rows of k and v in another.
``routes.py`` makes exchanges for each *nano-batch*, a whole micro-batch or one of its two parts. On the way back, o and
gradients take the same exchange with source and destination swapped.

Rows that follow each other in a tensor move together, as a *segment*. So a transfer is a short list of row ranges,
without an index for each row.

Array legend: R ranks, T tasks, N segments or pieces; all arrays are int64.
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
        """Returns an empty list of segments."""
        empty = np.zeros(0, np.int64)
        return Segments(empty, empty, empty, empty)

    @property
    def total(self) -> int:
        """Returns the rows of all segments together."""
        return int(self.rows.sum())

    def per_peer(self, ranks: int) -> np.ndarray:
        """Returns [ranks] rows exchanged with each peer."""
        return np.bincount(self.peer, weights=self.rows, minlength=ranks).astype(np.int64)

    def take(self, chosen: np.ndarray | slice) -> Segments:
        """Returns the segments that a slice or indices choose."""
        return Segments(self.peer[chosen], self.source[chosen], self.destination[chosen], self.rows[chosen])

    def between(self, low: int, high: int) -> Segments:
        """Returns the segments from index ``low`` up to ``high``."""
        return self.take(slice(low, high))


@dataclass(frozen=True)
class RowExchange:
    """The way of q rows, or of k and v rows, from homes to servers, seen from one rank.

    A kernel reads one *region* of k,v rows for each task. A server receives each row once. While the server computes,
    it copies rows that several tasks share to the regions of these tasks.

    Attributes:
        source_rows: rows of this rank's home tensor.
        destination_rows: rows of this rank's buffer as a server; each of them arrives once.
        send: home rows of this rank that other servers need.
        receive: rows that other homes send to this server.
        keep: home rows of this rank that the rank needs as a server.
        repeat: copies from the server buffer to the regions of tasks; in backward, gradients of all copies of a row are
            added up. Empty if the buffer already consists of the regions.
        before: copies from the server buffer of the previous nano-batch to the regions of tasks; in backward, gradients
            of copies are added to the gradients of that buffer.
        travelling: rows that travel between any two ranks. The number is the same on every rank, so all ranks know when
            to leave an exchange out.
        ahead_at_server: [R] int64 rows that each server receives from homes below this rank. Receivers pack rows by
            sender, so this rank's rows begin there.
        ahead_at_home: [R] int64 rows that each home gets back from servers below this rank.
        most_to_server: rows that the busiest server receives from other ranks; the same on every rank.
        most_to_home: rows that the busiest home gets back from other ranks; the same on every rank.
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
        server: [N] rank that reads the rows; it may be the sender.
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
        """Returns the pieces of ``reads`` that come from home, and the pieces that come from a *gateway*.

        A gateway is a server that received the rows from another node, and hands them on inside its own node.

        Args:
            reads: the ranges of home rows that tasks read.
            begin: [T] first row that each task reads.
            offset: [T] where this row is in the server's buffer.
            shards: the home rank and row of every range of a document.
            links: which ranks share a node; None if all ranks share one.
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
    """The exchanges of q rows, or of k and v rows, for all ranks.

    Args:
        pieces: the row ranges that servers read.
        source_rows: [R] rows of every sender's tensor.
        only: the one rank whose exchange will be asked for, which saves time; None if any rank may be asked for.
    """

    def __init__(self, pieces: Pieces, source_rows: np.ndarray, only: int | None) -> None:
        ranks = len(source_rows)
        home, server, rows = pieces.sender, pieces.server, pieces.rows
        source, destination = pieces.source, pieces.destination
        self._ranks, self._source_rows = ranks, source_rows
        # Rows to send are grouped by home, rows to receive by server.
        self._by_home = _Grouped(home, Segments(server, source, destination, rows), ranks, only)
        self._by_server = _Grouped(server, Segments(home, source, destination, rows), ranks, only)
        away = np.flatnonzero(home != server)
        home, server, rows = home[away], server[away], rows[away]
        self._to_server = _Arrivals(home, server, rows, ranks, only)
        self._to_home = _Arrivals(server, home, rows, ranks, only)

    def of(self, rank: int, destination_rows: int, repeat: Segments, before: Segments) -> RowExchange:
        """Returns the exchange of one rank, whose buffer as a server has ``destination_rows``.

        ``repeat`` and ``before`` are fields of :class:`RowExchange`."""
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
    """The segments of all ranks, grouped by ``owner`` [N], the rank at this end.

    Segments that continue each other become one segment. Example: rows 0 to 3 go to rows 10 to 13 of a peer, and rows 4
    and 5 go to rows 14 and 15. They become one segment of 6 rows."""

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
        """Returns the rank's segments with other ranks, and its segments with itself."""
        mine = self._segments.between(*self._bounds[rank : rank + 2].tolist())
        low, high = np.searchsorted(mine.peer, (rank, rank + 1)).tolist()
        others = np.concatenate((np.arange(low), np.arange(high, len(mine))))
        return (mine.take(others) if high > low else mine), mine.between(low, high)


class _Arrivals:
    """Counts the rows that reach each rank from other ranks, for [N] pieces with a sender and a receiver each.

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
        """Returns [R] int64 rows that each receiver gets from senders below ``rank``."""
        below = slice(len(self._sender) if self._all_below else int(np.searchsorted(self._sender, rank)))
        return np.bincount(self._receiver[below], self._rows[below], self._ranks).astype(np.int64)
