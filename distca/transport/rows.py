"""Row moves: a route's segments in the form in which a device executes them, and what a rank does with received rows.

Packed rows are ordered by (peer, row in the server's buffer) on both sides, so sender and receiver agree without
talking. On the way back several servers may return a gradient for one k,v row: these are added in float32, in the order
of the servers' ranks, and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from distca.attention.kernel import to_device
from distca.plan import RowExchange, Segments


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
        keep: (source row, destination row, rows) of the ranges that stay on this rank.
        reduction: how rows received more than once are added up; None where every row has one sender.
        travelling: rows that travel between any two ranks of the pool.
    """

    source_rows: int
    destination_rows: int
    send_counts: list[int]
    receive_counts: list[int]
    send_index: torch.Tensor
    receive_index: torch.Tensor
    keep: list[tuple[int, int, int]]
    reduction: Reduction | None
    travelling: int

    @staticmethod
    def to_server(exchange: RowExchange, ranks: int, device: torch.device | str) -> RowMoves:
        """From the home ranks to the servers."""
        return RowMoves(
            exchange.source_rows,
            exchange.destination_rows,
            exchange.send.per_peer(ranks).tolist(),
            exchange.receive.per_peer(ranks).tolist(),
            to_device(_rows(exchange.send.source, exchange.send.rows), device),
            to_device(_rows(exchange.receive.destination, exchange.receive.rows), device),
            _ranges(exchange.keep.source, exchange.keep.destination, exchange.keep.rows),
            None,
            exchange.travelling,
        )

    @staticmethod
    def to_home(exchange: RowExchange, ranks: int, device: torch.device | str) -> RowMoves:
        """Back from the servers to the home ranks."""
        home_rows = _rows(exchange.send.source, exchange.send.rows)
        return RowMoves(
            exchange.destination_rows,
            exchange.source_rows,
            exchange.receive.per_peer(ranks).tolist(),
            exchange.send.per_peer(ranks).tolist(),
            to_device(_rows(exchange.receive.destination, exchange.receive.rows), device),
            to_device(home_rows, device),
            _ranges(exchange.keep.destination, exchange.keep.source, exchange.keep.rows),
            Reduction.of(home_rows, exchange.keep, device),
            exchange.travelling,
        )

    def copy_kept(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy the ranges that stay on this rank."""
        for begin, target, rows in self.keep:
            destination[target : target + rows].copy_(source[begin : begin + rows])

    def place_received(self, packed: torch.Tensor, destination: torch.Tensor) -> None:
        """Put received rows in their places; kept ranges are there already."""
        if self.reduction is not None:
            self.reduction.add(packed, destination)
        elif len(packed):
            destination.index_copy_(0, self.receive_index, packed)


@dataclass(frozen=True)
class Reduction:
    """Adds up rows that were returned more than once.

    Attributes:
        single: int64 packed rows whose home row has no other writer.
        single_home: int64 their home rows.
        shared_home: int64 home rows with several writers.
        rounds: one entry per repetition, in packed order: (packed rows, their places in ``shared_home``); within a
            round no home row repeats, so the additions have one order.
    """

    single: torch.Tensor
    single_home: torch.Tensor
    shared_home: torch.Tensor
    rounds: list[tuple[torch.Tensor, torch.Tensor]]

    @staticmethod
    def of(home_rows: np.ndarray, keep: Segments, device: torch.device | str) -> Reduction | None:
        """Reduction of packed rows for ``home_rows``; None if each home row is written once."""
        kept = _rows(keep.source, keep.rows)
        top = int(max(home_rows.max(initial=-1), kept.max(initial=-1))) + 1
        writers = np.bincount(home_rows, minlength=top) + np.bincount(kept, minlength=top)
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
        return Reduction(
            to_device(single, device), to_device(home_rows[single], device), to_device(shared_home, device), rounds
        )

    def add(self, packed: torch.Tensor, destination: torch.Tensor) -> None:
        """Add ``packed`` into ``destination``, which holds the kept rows and zeros elsewhere."""
        if len(self.single):
            destination.index_copy_(0, self.single_home, packed.index_select(0, self.single))
        if not len(self.shared_home):
            return
        wide = torch.promote_types(destination.dtype, torch.float32)
        total = destination.index_select(0, self.shared_home).to(wide)
        for rows, place in self.rounds:
            total.index_add_(0, place, packed.index_select(0, rows).to(wide))
        destination.index_copy_(0, self.shared_home, total.to(destination.dtype))


def _rows(begin: np.ndarray, count: np.ndarray) -> np.ndarray:
    """All rows of the ranges [begin, begin + count), one after the other."""
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(begin - (ends - count), count)


def _ranges(source: np.ndarray, destination: np.ndarray, rows: np.ndarray) -> list[tuple[int, int, int]]:
    return list(zip(source.tolist(), destination.tolist(), rows.tolist(), strict=True))


def _repetition(values: np.ndarray) -> np.ndarray:
    """How many equal values come before each value."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)])
    counts = np.diff(np.append(begins, len(ordered)))
    repetition = np.empty(len(values), np.int64)
    repetition[order] = np.arange(len(values)) - np.repeat(begins, counts)
    return repetition
