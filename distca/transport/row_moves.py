"""The index tensors with which a rank sends rows of q, k, v, outputs or gradients, and stores received rows.

Recurrent layers (linear attention, SSM) use the same moves. For such layers, "server" means the rank that receives
rows, and "home" the rank that sends them.

- home: the rank that holds a row between layers.
- server: a rank that computes attention. It gets q, k and v rows from homes, into a buffer.
- packed rows: rows that travel, sorted by the rank at the other end, then by row in the server's buffer.
- gateway: a server that gets k,v rows from another node, and sends them on to other servers of its node.
- relay: the exchange between gateways and these other servers. On the way back, gateways add up gradients.
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
    """One rank's part of a row exchange, in one direction.

    Rows move from a *source* tensor to a *destination* tensor. On the way to servers, the source is the home's tensor
    and the destination the server's buffer. On the way back, the source is the server's buffer. *Kept* rows move from
    source to destination on the same rank. In a relay, the gateway's buffer takes the place of the home's tensor.

    Attributes:
        source_rows, destination_rows: number of rows of each tensor, without padding rows at its end.
        send_counts, receive_counts: number of rows to and from each rank.
        send_index: int64 indices of the source rows to send, in packed order.
        receive_index: int64 indices of the destination rows of received rows, in packed order.
        send_ranges: for each receiving rank, [N, 3] int64 on the host. Each line is a range of rows: first source row,
            first row among all packed rows that the receiver gets from all ranks, number of rows.
        most_received: the most rows that any rank receives.
        keep_source, keep_destination: int64 indices of kept rows in the source and in the destination.
        keep_ranges: [N, 3] int64 on the host. Each line is a range of kept rows: first source row, first destination
            row, number of rows.
        reduction: the additions, if a destination row gets several values; else None.
        travelling: number of rows that travel, summed over all ranks.
        relay_before: moves of gradients from servers to gateways, before these moves; None without a relay.
        relay_after: moves of k,v rows from gateways to servers, after these moves; None without a relay.
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
        """Returns the results of :meth:`there_and_back` for ``exchange``, with the moves of ``relay`` if given."""
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

        Args:
            exchange: the planner's numpy arrays of the rows that travel to servers or are kept.
            adds: whether rows that come back are added to values that their destination rows have already.
        """
        # "sent" and "kept" are rows of a home's tensor, "received" and "placed" are rows of a server's buffer.
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
        # On the way back, a home's row gets several values if it was sent twice, or sent and kept.
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
        """Whether no rank sends rows, and each row keeps its index. Then the source can serve as the destination."""
        source, destination, rows = self.keep_ranges.T
        apart = self.relay_before is None and self.relay_after is None and self.reduction is None
        whole = self.source_rows == self.destination_rows == rows.sum()
        return bool(apart and not self.travelling and whole and (source == destination).all())

    def sent_to(self, peer: int) -> tuple[np.ndarray, torch.Tensor]:
        """Returns the parts of ``send_ranges`` and ``send_index`` that go to rank ``peer``."""
        first = sum(self.send_counts[:peer])
        return self.send_ranges[peer], self.send_index[first : first + self.send_counts[peer]]

    def copy_kept(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        move_rows(source, self.keep_source, destination, self.keep_destination)

    def place_received(self, packed: torch.Tensor, destination: torch.Tensor) -> None:
        """Writes the received rows ``packed`` to ``destination``, or adds them to it if a row gets several values.

        With a ``reduction``, callers must call :meth:`copy_kept` first, because received rows are added to kept rows. A
        row that gets several values, none of them kept, must hold zeros before. If the moves were made with ``adds``
        (:meth:`there_and_back`), received rows are added to what each destination row holds."""
        if self.reduction is not None:
            self.reduction.add(packed, destination)
        else:
            move_rows(packed, None, destination, self.receive_index)


@dataclass(frozen=True)
class Reduction:
    """The additions of packed rows that come back to a home.

    A home row is *single* if it gets one value, and *shared* if it gets more. A kept value counts as one of these.

    Example: packed rows 0, 1 and 2 are for home rows 5, 9 and 5. Row 9 is single: ``single`` is [1] and ``single_home``
    is [9]. Row 5 is shared: ``shared_home`` is [5], ``copies`` is [0, 2] and ``borders`` is [0, 2]. ``rounds`` is
    [([0], [0]), ([2], [0])].

    Attributes:
        single, single_home: int64 indices of packed rows for single home rows, and of these home rows.
        shared_home: int64 indices of shared home rows, ascending.
        copies: int64 indices of packed rows for shared home rows, grouped by home row, in packed order.
        borders: [len(shared_home) + 1] int64; copies[borders[i]:borders[i+1]] are added to home row shared_home[i].
        rounds: the same additions in the form that torch needs, for rows that the CUDA library does not add. A round is
            a pair: indices of packed rows, and for each the index i in shared_home. A round has each i at most once, so
            the order of additions is fixed.
    """

    single: torch.Tensor
    single_home: torch.Tensor
    shared_home: torch.Tensor
    copies: torch.Tensor
    borders: torch.Tensor
    rounds: list[tuple[torch.Tensor, torch.Tensor]]

    @staticmethod
    def of(home_rows: np.ndarray, kept_rows: np.ndarray, device: Destination) -> Reduction | None:
        """Returns None if no home row gets several values.

        Args:
            home_rows: [N] int64 index of the home row of each packed row.
            kept_rows: [M] int64 indices of home rows that have a value already.
        """
        # "writers" is the number of values of each home row. "packed" are the packed rows for shared home rows, and
        # "place" says for which: indices in "shared_home". Round n has the n-th packed row of each shared home row.
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
        move_rows(packed, self.single, destination, self.single_home)
        sum_rows(packed, self.copies, self.borders, self.rounds, destination, self.shared_home)


def _apart(begin: np.ndarray, count: np.ndarray) -> bool:
    """Whether no two of the ranges [begin, begin + count) overlap."""
    order = np.argsort(begin)
    return bool((begin[order][1:] >= (begin + count)[order][:-1]).all())


def _ranges_by_peer(peer: np.ndarray, source: np.ndarray, rows: np.ndarray, ahead: np.ndarray) -> dict[int, np.ndarray]:
    """Returns the ``send_ranges`` of :class:`RowMoves`, from N ranges of source rows.

    Example: this rank sends source rows [5, 8) and [20, 22) to rank 1. Lower ranks together send 10 rows to rank 1. The
    result is {1: [[5, 10, 3], [20, 13, 2]]}.

    Args:
        peer, source, rows: [N] receiving rank of each range, ascending; first source row; number of rows.
        ahead: [ranks] number of rows that each receiver gets from ranks below this one.
    """
    if not len(peer):
        return {}
    # "before" is the number of rows in all earlier ranges; rows for earlier peers are subtracted again.
    before = np.cumsum(rows) - rows
    place = ahead[peer] + before - before[np.searchsorted(peer, peer, side="left")]
    ranges = np.ascontiguousarray(np.stack((source, place, rows), axis=1))
    borders = np.flatnonzero(np.diff(peer, prepend=-1))
    return {int(peer[at]): part for at, part in zip(borders, np.split(ranges, borders[1:]), strict=True)}


def _repetition(values: np.ndarray) -> np.ndarray:
    """Returns for each of N values the number of equal values before it. Example: [4, 7, 4, 4] gives [0, 0, 1, 2]."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)])
    counts = np.diff(np.append(begins, len(ordered)))
    repetition = np.empty(len(values), np.int64)
    repetition[order] = np.arange(len(values)) - np.repeat(begins, counts)
    return repetition
