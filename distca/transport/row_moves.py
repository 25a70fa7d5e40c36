"""Row moves: the index tensors by which a rank sends rows, and puts received rows in their places.

The *home* of a row is the rank that holds it between layers; a *server* is a rank that computes attention with it.
Every rank is usually both. Routes of the planner (numpy) become :class:`RowMoves`, one object for each direction, and
transports run them.

Rows that travel are *packed*: they lie one after the other, sorted by peer and then by row in the server's buffer.
Sender and receiver both use this order, so they need no message about it.

Several servers may return a gradient for the same k,v row. Home adds these in float32, in the order of the servers'
ranks, and rounds once. Between nodes of several ranks, a k,v row travels once to each node, to one server there: its
*gateway*. A second exchange inside the node, the *relay*, hands it on. On the way back the gateway first adds its
node's gradients to its own, and then sends the sum home.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from distca.device.host_to_device import Destination, to_device
from distca.plan import RowExchange
from distca.plan.sorting import expand
from distca.transport.gather_scatter import move_rows, sum_rows


@dataclass(frozen=True)
class RowMoves:
    """One direction of a row exchange, as seen from one rank.

    The *source* is the tensor that rows leave, the *destination* the tensor that they reach: a home tensor and a
    server's buffer, or the reverse on the way back. Rows that the rank *keeps* go from one to the other on this rank.

    Attributes:
        source_rows: rows of the source; it may have further rows of padding.
        destination_rows: rows of the destination; it may have further rows of padding.
        send_counts: number of rows for each rank of the pool.
        receive_counts: number of rows from each rank of the pool.
        send_index: int64 numbers of source rows, in packed order.
        receive_index: int64 numbers of destination rows, in packed order.
        send_ranges: by receiving rank, [N, 3] int64 on the host. Each line is a range of rows: the first source row,
            the first row among all packed rows that the receiver gets, and the number of rows.
        most_received: rows that reach the busiest rank of the pool; the same on every rank.
        keep_source: int64 numbers of the source rows that the rank keeps.
        keep_destination: int64 numbers of their destination rows.
        keep_ranges: [N, 3] int64 on the host, the same as ranges: source row, destination row, number of rows.
        reduction: how to add up rows that share a destination row; None if each has its own.
        travelling: number of rows that travel in the whole pool; the same on every rank.
        relay_before: moves of gradients to gateways inside nodes, which run before these moves; None without a relay.
        relay_after: moves of rows from gateways inside nodes, which run after these moves; None without a relay.
    """

    source_rows: int
    destination_rows: int
    send_counts: list[int]
    receive_counts: list[int]
    send_index: torch.Tensor
    receive_index: torch.Tensor
    send_ranges: dict[int, np.ndarray]
    most_received: int
    keep_source: torch.Tensor
    keep_destination: torch.Tensor
    keep_ranges: np.ndarray
    reduction: Reduction | None
    travelling: int
    relay_before: RowMoves | None = None
    relay_after: RowMoves | None = None

    @staticmethod
    def in_hops(
        exchange: RowExchange, relay: RowExchange | None, ranks: int, device: Destination
    ) -> tuple[RowMoves, RowMoves]:
        """Returns moves as :meth:`there_and_back` does; ``relay`` has the rows that gateways hand on, None for none."""
        to_server, to_home = RowMoves.there_and_back(exchange, ranks, device)
        if relay is None:
            return to_server, to_home
        after, before = RowMoves.there_and_back(relay, ranks, device, adds=True)
        return replace(to_server, relay_after=after), replace(to_home, relay_before=before)

    @staticmethod
    def there_and_back(
        exchange: RowExchange, ranks: int, device: Destination, adds: bool = False
    ) -> tuple[RowMoves, RowMoves]:
        """Returns the moves from homes to servers, and the moves back.

        Both share their index tensors, with source and destination swapped.

        Args:
            exchange: the rows that move, as this rank's route has them.
            ranks: number of ranks in the pool.
            device: the rows' device.
            adds: whether rows that come back are added to the values in the destination, in place of replacing them.
        """
        # Row ranges become row numbers. At home, rows are sent or kept; on the server they are received or placed.
        send, receive, keep = exchange.send, exchange.receive, exchange.keep
        home_rows, kept_rows = expand(send.source, send.rows), expand(keep.source, keep.rows)
        sent, kept = to_device(home_rows, device), to_device(kept_rows, device)
        received = to_device(expand(receive.destination, receive.rows), device)
        placed = to_device(expand(keep.destination, keep.rows), device)
        send_counts, receive_counts = send.per_peer(ranks).tolist(), receive.per_peer(ranks).tolist()
        to_server = RowMoves(
            exchange.source_rows,
            exchange.destination_rows,
            send_counts,
            receive_counts,
            sent,
            received,
            _ranges_by_peer(send.peer, send.source, send.rows, exchange.ahead_at_server),
            exchange.most_to_server,
            kept,
            placed,
            np.ascontiguousarray(np.stack((keep.source, keep.destination, keep.rows), axis=1)),
            None,
            exchange.travelling,
        )
        # On the way back a home row has several values if several servers got it, or one got it and this rank kept it.
        once = not adds and _apart(np.append(send.source, keep.source), np.append(send.rows, keep.rows))
        to_home = RowMoves(
            exchange.destination_rows,
            exchange.source_rows,
            receive_counts,
            send_counts,
            received,
            sent,
            _ranges_by_peer(receive.peer, receive.destination, receive.rows, exchange.ahead_at_home),
            exchange.most_to_home,
            placed,
            kept,
            np.ascontiguousarray(np.stack((keep.destination, keep.source, keep.rows), axis=1)),
            None if once else Reduction.of(home_rows, np.unique(home_rows) if adds else kept_rows, device),
            exchange.travelling,
        )
        return to_server, to_home

    @cached_property
    def in_place(self) -> bool:
        """Whether the destination would be a copy of the source: no row changes its rank or its place."""
        source, destination, rows = self.keep_ranges.T
        apart = self.relay_before is None and self.relay_after is None and self.reduction is None
        whole = self.source_rows == self.destination_rows == rows.sum()
        return bool(apart and not self.travelling and whole and (source == destination).all())

    def sent_to(self, peer: int) -> tuple[np.ndarray, torch.Tensor]:
        """Returns a receiving rank's ``send_ranges`` and its part of ``send_index``."""
        first = sum(self.send_counts[:peer])
        return self.send_ranges[peer], self.send_index[first : first + self.send_counts[peer]]

    def copy_kept(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copies the rows that this rank keeps, on the current stream."""
        move_rows(source, self.keep_source, destination, self.keep_destination)

    def place_received(self, packed: torch.Tensor, destination: torch.Tensor) -> None:
        """Writes received rows to their places, or adds them if there is a reduction.

        With a reduction, kept rows must have been copied before, since received rows are added to them."""
        if self.reduction is not None:
            self.reduction.add(packed, destination)
        else:
            move_rows(packed, None, destination, self.receive_index)


@dataclass(frozen=True)
class Reduction:
    """The additions of returned rows whose home row gets several values.

    The values of a home row are the packed rows for it and, if the rank keeps the row, the value that is there. A home
    row with one value is *single*, one with more is *shared*. Example: packed rows 0, 1 and 2 are for home rows 5, 9
    and 5. Row 9 is single: ``single`` is [1] and ``single_home`` [9]. Row 5 is shared: ``shared_home`` is [5],
    ``copies`` [0, 2] and ``borders`` [0, 2].

    Attributes:
        single: int64 packed rows for single home rows.
        single_home: int64 home rows of these.
        shared_home: int64 shared home rows, ascending.
        copies: int64 packed rows for shared home rows, grouped by home row, in packed order.
        borders: [len(shared_home) + 1] int64; copies[borders[i]:borders[i+1]] are added to home row shared_home[i].
        rounds: the same additions for torch, as a list of (packed rows, indices i of their home rows). No i is twice in
            one round, so that the order of additions is fixed. The example has the rounds ([0], [0]) and ([2], [0]).
    """

    single: torch.Tensor
    single_home: torch.Tensor
    shared_home: torch.Tensor
    copies: torch.Tensor
    borders: torch.Tensor
    rounds: list[tuple[torch.Tensor, torch.Tensor]]

    @staticmethod
    def of(home_rows: np.ndarray, kept_rows: np.ndarray, device: Destination) -> Reduction | None:
        """The reduction for packed rows with the given home rows; None if each home row has one value.

        Args:
            home_rows: [N] int64 home row of each packed row.
            kept_rows: [M] int64 home rows that have a value already.
            device: device of the index tensors.
        """
        # "writers" [home rows] counts the values of each home row. "place" is the index in shared_home of each packed
        # row for a shared home row. A packed row's round is the number of packed rows before it with the same place.
        top = int(max(home_rows.max(initial=-1), kept_rows.max(initial=-1))) + 1
        writers = np.bincount(home_rows, minlength=top) + np.bincount(kept_rows, minlength=top)
        if writers.max(initial=0) <= 1:
            return None
        is_shared = writers[home_rows] > 1
        packed = np.flatnonzero(is_shared)
        shared_home = np.flatnonzero(writers > 1)
        place = np.searchsorted(shared_home, home_rows[packed])
        repetition = _repetition(place)
        rounds = [
            (to_device(packed[repetition == n], device), to_device(place[repetition == n], device))
            for n in range(int(repetition.max(initial=-1)) + 1)
        ]
        single = np.flatnonzero(~is_shared)
        borders = np.concatenate(([0], np.cumsum(np.bincount(place, minlength=len(shared_home)))))
        return Reduction(
            to_device(single, device),
            to_device(home_rows[single], device),
            to_device(shared_home, device),
            to_device(packed[np.argsort(place, kind="stable")], device),
            to_device(borders, device),
            rounds,
        )

    def add(self, packed: torch.Tensor, destination: torch.Tensor) -> None:
        """Writes packed rows to single home rows of ``destination``, and adds them to shared ones."""
        move_rows(packed, self.single, destination, self.single_home)
        sum_rows(packed, self.copies, self.borders, self.rounds, destination, self.shared_home)


def _apart(begin: np.ndarray, count: np.ndarray) -> bool:
    """Whether no number is in two of the ranges [begin, begin + count); [N] int64 both."""
    order = np.argsort(begin)
    return bool((begin[order][1:] >= (begin + count)[order][:-1]).all())


def _ranges_by_peer(peer: np.ndarray, source: np.ndarray, rows: np.ndarray, ahead: np.ndarray) -> dict[int, np.ndarray]:
    """The ``send_ranges`` of :class:`RowMoves`, from N ranges of source rows.

    Example: this rank sends rows [5, 8) and [20, 22) to rank 1, which gets 10 rows from ranks before this one. The
    result is {1: [[5, 10, 3], [20, 13, 2]]}.

    Args:
        peer: [N] receiving rank of each range, ascending.
        source: [N] first source row.
        rows: [N] number of rows.
        ahead: [ranks] number of rows that each receiver gets from ranks below this one.
    """
    if not len(peer):
        return {}
    # "before" counts the rows of all ranges before a range, of this and other peers; the difference to the peer's first
    # range is the place among this peer's rows.
    before = np.cumsum(rows) - rows
    place = ahead[peer] + before - before[np.searchsorted(peer, peer, side="left")]
    ranges = np.ascontiguousarray(np.stack((source, place, rows), axis=1))
    borders = np.flatnonzero(np.diff(peer, prepend=-1))
    return {int(peer[at]): part for at, part in zip(borders, np.split(ranges, borders[1:]), strict=True)}


def _repetition(values: np.ndarray) -> np.ndarray:
    """[N] number of equal values before each value. Example: 4, 7, 4, 4 gives 0, 0, 1, 2."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)])
    counts = np.diff(np.append(begins, len(ordered)))
    repetition = np.empty(len(values), np.int64)
    repetition[order] = np.arange(len(values)) - np.repeat(begins, counts)
    return repetition
