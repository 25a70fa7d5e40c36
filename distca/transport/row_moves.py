"""Row moves: which rows a rank sends to which peer as index tensors, and what it does with rows that it receives.

A home has the rows of documents, and a server computes with them. Every rank may be both. Travelling rows are *packed*:
they lie one after the other, by (peer, row in the server's buffer). Sender and receiver use this order, so they need no
message about it. On the way back several servers may return a gradient for one k,v row. These are added in float32, in
the order of the servers' ranks, and rounded once. With a relay, keys and values travel once to each node, to a gateway
there that hands them on. On the way back it first adds the gradients of its node to its own. Then the home adds those
of gateways.
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

    Attributes:
        source_rows: rows of the source tensor that take part.
        destination_rows: rows of the destination tensor that take part.
        send_counts: [ranks] rows for each peer.
        receive_counts: [ranks] rows from each peer.
        send_index: int64 source rows in packed order.
        receive_index: int64 destination rows in packed order.
        send_ranges: by peer that gets rows, [N, 3] int64 on the host: first source row, first row among all rows that
            the peer receives, rows.
        most_received: most rows that any rank of the pool receives; the same on every rank.
        keep_source: int64 source rows that stay on this rank.
        keep_destination: int64 where they go.
        keep_ranges: [N, 3] int64 on the host, the kept rows as ranges: source row, destination row, rows.
        reduction: how rows are added up that are received more than once, or received and kept; None for none.
        travelling: number of rows that travel in the whole pool.
        relay_before: moves that come first, within a node: ranks send gradients to their gateway, which adds them to
            its own. None without a relay.
        relay_after: moves that come last, within a node: a gateway hands on rows that arrived. None without a relay.
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
        """Returns moves as :meth:`there_and_back` does. ``relay`` is what gateways hand on within their nodes."""
        to_server, to_home = RowMoves.there_and_back(exchange, ranks, device)
        if relay is None:
            return to_server, to_home
        after, before = RowMoves.there_and_back(relay, ranks, device, adds=True)
        return replace(to_server, relay_after=after), replace(to_home, relay_before=before)

    @staticmethod
    def there_and_back(
        exchange: RowExchange, ranks: int, device: Destination, adds: bool = False
    ) -> tuple[RowMoves, RowMoves]:
        """Returns the moves from home ranks to servers, and those back. Both have the same index tensors, with source
        and destination exchanged.

        Args:
            exchange: the rows that move.
            ranks: number of ranks in the pool.
            device: where the rows live.
            adds: whether rows that come back are added to the rows that are there.
        """
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
        """Whether no row travels between any ranks, and all rows keep their places: the destination would be a copy of
        the source."""
        source, destination, rows = self.keep_ranges.T
        apart = self.relay_before is None and self.relay_after is None and self.reduction is None
        whole = self.source_rows == self.destination_rows == rows.sum()
        return bool(apart and not self.travelling and whole and (source == destination).all())

    def sent_to(self, peer: int) -> tuple[np.ndarray, torch.Tensor]:
        """Returns one peer's ``send_ranges`` and its part of ``send_index``."""
        first = sum(self.send_counts[:peer])
        return self.send_ranges[peer], self.send_index[first : first + self.send_counts[peer]]

    def copy_kept(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copies the rows that stay on this rank, on the current stream."""
        move_rows(source, self.keep_source, destination, self.keep_destination)

    def place_received(self, packed: torch.Tensor, destination: torch.Tensor) -> None:
        """Puts received rows in their places, or adds them where rows are added up. Kept rows must be there already."""
        if self.reduction is not None:
            self.reduction.add(packed, destination)
        else:
            move_rows(packed, None, destination, self.receive_index)


@dataclass(frozen=True)
class Reduction:
    """Adds up rows that were returned more than once, or returned to a row that is there.

    Example: the packed rows 0, 1 and 2 are for home rows 5, 9 and 5. Row 1 is single. Home row 5 is shared, with copies
    0 and 2; they are added in two rounds.

    Attributes:
        single: int64 packed rows whose home row has no other writer.
        single_home: int64 home rows of these.
        shared_home: int64 home rows with several writers.
        copies: int64 packed rows of the shared home rows, those of one home row together, in packed order.
        borders: [shared_home + 1] int64; copies[borders[i]:borders[i+1]] belong to shared home row i.
        rounds: the same additions in the form that torch needs: (packed rows, their places in ``shared_home``). Within
            a round no home row repeats, so the additions have one order.
    """

    single: torch.Tensor
    single_home: torch.Tensor
    shared_home: torch.Tensor
    copies: torch.Tensor
    borders: torch.Tensor
    rounds: list[tuple[torch.Tensor, torch.Tensor]]

    @staticmethod
    def of(home_rows: np.ndarray, kept_rows: np.ndarray, device: Destination) -> Reduction | None:
        """The reduction of packed rows for ``home_rows``, beside ``kept_rows``; None if each home row is written
        once."""
        # "writers" counts the packed and kept rows of each home row; "repetition" is how many packed rows of the same
        # home row come before a packed row, which is its round.
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
        """Adds ``packed`` to ``destination``. Rows that have one sender and nothing else are written, not added."""
        move_rows(packed, self.single, destination, self.single_home)
        sum_rows(packed, self.copies, self.borders, self.rounds, destination, self.shared_home)


def _apart(begin: np.ndarray, count: np.ndarray) -> bool:
    """Whether no row is in two of the ranges [begin, begin + count)."""
    order = np.argsort(begin)
    return bool((begin[order][1:] >= (begin + count)[order][:-1]).all())


def _ranges_by_peer(peer: np.ndarray, source: np.ndarray, rows: np.ndarray, ahead: np.ndarray) -> dict[int, np.ndarray]:
    """[N, 3] (source row, row among all that the peer receives, rows) by peer, from segments sorted by peer.

    ``ahead`` [ranks] has the rows that each peer receives from ranks before this one."""
    if not len(peer):
        return {}
    before = np.cumsum(rows) - rows
    place = ahead[peer] + before - before[np.searchsorted(peer, peer, side="left")]
    ranges = np.ascontiguousarray(np.stack((source, place, rows), axis=1))
    borders = np.flatnonzero(np.diff(peer, prepend=-1))
    return {int(peer[at]): part for at, part in zip(borders, np.split(ranges, borders[1:]), strict=True)}


def _repetition(values: np.ndarray) -> np.ndarray:
    """[N] how many equal values come before each value. Example: 4, 7, 4, 4 gives 0, 0, 1, 2."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)])
    counts = np.diff(np.append(begins, len(ordered)))
    repetition = np.empty(len(values), np.int64)
    repetition[order] = np.arange(len(values)) - np.repeat(begins, counts)
    return repetition
