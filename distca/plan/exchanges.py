"""Exchanges of rows between ranks: the rows that each rank sends, receives and keeps.

Attention uses them as said below. Recurrent layers use them for halo rows and states (``plan/recurrent``).

A *row* is one token's q, or its k and v. The *home* of a row is the rank that computes the token's linear layers. A
*server* is a rank that computes attention. A *task* is a range of query rows of one document on one server.

q goes from homes to servers in one exchange, and k and v in another. Between nodes, k and v may first go to one server
of a node, the *gateway*. A third exchange then brings them to other servers of the node. o, dQ, dK and dV return by the
same exchanges, with source and destination swapped. A transport runs these exchanges as one, whose *parts* are q, and k
with v. On the way to servers, the third exchange is the second hop of the part with k and v.

Array legend: R ranks, N ranges of rows; all arrays are int64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.plan.layout import Shards
from distca.plan.network import Links, Reads
from distca.plan.sorting import order_by


@dataclass(frozen=True)
class Segments:
    """Ranges of rows that are copied between two tensors; in exchanges, sorted by (peer, destination).

    Attributes:
        peer: [N] the rank at the other end; this rank itself for copies inside it.
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
        empty = np.zeros(0, np.int64)
        return Segments(empty, empty, empty, empty)

    @property
    def total(self) -> int:
        return int(self.rows.sum())

    def per_peer(self, ranks: int) -> np.ndarray:
        """Returns [ranks] rows exchanged with each peer."""
        return np.bincount(self.peer, weights=self.rows, minlength=ranks).astype(np.int64)

    def take(self, chosen: np.ndarray | slice) -> Segments:
        return Segments(self.peer[chosen], self.source[chosen], self.destination[chosen], self.rows[chosen])

    def between(self, low: int, high: int) -> Segments:
        return self.take(slice(low, high))


@dataclass(frozen=True)
class RowExchange:
    """One rank's part of an exchange, such as that of q rows, or of k and v rows.

    The rank has a home tensor, from which rows are sent, and a server buffer, which gets each row once. A kernel reads
    one *region* of k,v rows for each task. If tasks share rows, the server copies rows from its buffer to the regions.
    In the exchange from gateways, a gateway's server buffer takes the place of the home tensor.

    Attributes:
        source_rows: number of rows of the home tensor.
        destination_rows: number of rows of the server buffer.
        send: rows that this home sends to other servers.
        receive: rows that this server receives from other homes.
        keep: rows from this rank's home tensor to its own server buffer.
        repeat: copies from the server buffer to regions. Empty if the buffer already consists of the regions.
        before: in pong (the second nano-batch), copies to regions from rows that this server keeps of ping. Empty in
            other cases.
        travelling: number of rows that travel, summed over all ranks. If it is 0, all ranks skip the exchange.
        ahead_at_server: [R] rows that each server receives from ranks below this rank: the offset of this rank's rows
            among all rows that arrive at that server.
        ahead_at_home: [R] rows that each home gets back from ranks below this rank.
        most_to_server: the most rows that any server receives from other ranks.
        most_to_home: the most rows that any home gets back from other ranks.
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
class ReadRanges:
    """The ranges of rows that all servers read. Each of the N ranges is a *piece*.

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
    ) -> tuple[ReadRanges, ReadRanges]:
        """Returns the pieces that servers receive from homes, and the pieces that servers receive from gateways.

        Args:
            reads: the ranges of home rows that T tasks, or T contexts (``plan.py``), read.
            begin: [T] first position in the document whose row comes into the server's buffer for a task or context.
            offset: [T] row of this position in the server's buffer.
            shards: the home rank and row of every range of a document.
            links: which ranks share a node; None if all ranks share one.
        """
        start = np.maximum(begin[reads.task], shards.start[reads.shard])
        source = shards.row[reads.shard] + start - shards.start[reads.shard]
        destination = offset[reads.task] + start - begin[reads.task]
        from_home, on, gateway = reads.in_hops(links, ranks)
        home, server, rows = reads.home, reads.server, reads.rows
        # Piece on[n] comes from a gateway, which itself reads piece gateway[n]. Both pieces begin with the same row.
        return (
            ReadRanges(home[from_home], server[from_home], source[from_home], destination[from_home], rows[from_home]),
            ReadRanges(server[gateway], server[on], destination[gateway], destination[on], rows[on]),
        )


class Exchanges:
    """The parts of all ranks in an exchange, such as that of q rows, or of k and v rows.

    Args:
        source_rows: [R] rows of every sender's tensor.
        only: the one rank that :meth:`of` will be called for, so that less is computed; None for all ranks.
    """

    def __init__(self, pieces: ReadRanges, source_rows: np.ndarray, only: int | None) -> None:
        ranks = len(source_rows)
        home, server, rows = pieces.sender, pieces.server, pieces.rows
        source, destination = pieces.source, pieces.destination
        self._ranks, self._source_rows = ranks, source_rows
        self._by_home = _Grouped(home, Segments(server, source, destination, rows), ranks, only)
        self._by_server = _Grouped(server, Segments(home, source, destination, rows), ranks, only)
        away = np.flatnonzero(home != server)
        home, server, rows = home[away], server[away], rows[away]
        self._to_server = _Arrivals(home, server, rows, ranks, only)
        self._to_home = _Arrivals(server, home, rows, ranks, only)

    def of(self, rank: int, destination_rows: int, repeat: Segments, before: Segments) -> RowExchange:
        """Returns one rank's part; for the arguments see :class:`RowExchange`."""
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
    """The segments of all ranks, grouped by ``owner`` [N]. A segment runs between its owner and its peer.

    Segments that continue each other become one segment. Example: rows 0 to 3 go to rows 10 to 13 of a peer, and rows 4
    and 5 go to rows 14 and 15. Together they are one segment of 6 rows."""

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
        """Returns the rank's segments whose peer is another rank, and those whose peer is the rank itself."""
        mine = self._segments.between(*self._bounds[rank : rank + 2].tolist())
        low, high = np.searchsorted(mine.peer, (rank, rank + 1)).tolist()
        others = np.concatenate((np.arange(low), np.arange(high, len(mine))))
        return (mine.take(others) if high > low else mine), mine.between(low, high)


class _Arrivals:
    """Counts the rows of N pieces that travel; ``most`` is the most rows that one receiver gets."""

    def __init__(
        self, sender: np.ndarray, receiver: np.ndarray, rows: np.ndarray, ranks: int, only: int | None
    ) -> None:
        # If only one rank will be asked for, only the senders below this rank are stored.
        order = np.argsort(sender, kind="stable") if only is None else np.flatnonzero(sender < only)
        self._sender, self._receiver, self._rows = sender[order], receiver[order], rows[order]
        self._ranks, self._all_below = ranks, only is not None
        everything = np.bincount(receiver, rows, ranks)
        self.total, self.most = int(everything.sum()), int(everything.max())

    def ahead(self, rank: int) -> np.ndarray:
        """Returns [R] int64 rows that each receiver gets from senders below ``rank``."""
        below = slice(len(self._sender) if self._all_below else int(np.searchsorted(self._sender, rank)))
        return np.bincount(self._receiver[below], self._rows[below], self._ranks).astype(np.int64)
