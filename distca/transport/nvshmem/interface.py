"""The interface between the NVSHMEM transport (transport.py) and its *fabric*: the memory and signals of all ranks.

Every rank has a receive buffer into which the other ranks, its *peers*, write rows. An *exchange* moves rows between
all ranks, and has the same number on every rank. After a sender has written rows, it signals that its rows of the
exchange have *arrived*. After a receiver has copied the rows out of its buffer, it signals that it has *consumed* the
exchange. Senders may then write to this memory again. Streams wait for signals, and the host does not.

``NvshmemFabric`` (symmetric_memory.py) implements the interface on GPUs; a test double implements it on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from distca.transport.cuda_ops import row_bytes
from distca.transport.interface import Part


@dataclass(frozen=True)
class Put:
    """Rows of one tensor to write to one peer.

    Attributes:
        source: contiguous tensor whose rows are sent.
        ranges: [N, 3] int64 on the host. Each line is a range of rows: the first source row, the first row in the
            peer's buffer, and the number of rows. Ranges follow each other in the buffer without gaps.
        rows: int64 on the device, the numbers of all source rows, in the order of ``ranges``.
        begin: the byte of the peer's receive buffer from which ``ranges`` counts rows.
    """

    source: torch.Tensor
    ranges: np.ndarray
    rows: torch.Tensor
    begin: int

    @property
    def bytes(self) -> int:
        """Bytes of all rows."""
        return len(self.rows) * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return row_bytes(self.source)


class Fabric(Protocol):
    """Access to the receive buffers and signals of all ranks. On GPUs no method blocks the host.

    Attributes:
        rank: this rank's number in the pool.
        ranks: number of ranks in the pool.
        receive_buffer: [capacity] uint8, this rank's buffer; equally large on every rank.
    """

    rank: int
    ranks: int
    receive_buffer: torch.Tensor

    def put(self, number: int, reuses: int, puts: dict[int, list[Put]]) -> Any:
        """Queues the writes of an exchange, behind the work that the current stream has so far.

        Args:
            number: number of the exchange.
            reuses: number of an earlier exchange. Writes to a peer wait until the peer has consumed that exchange. With
                0 they do not wait.
            puts: the rows to write, by peer. Each of these peers then gets the signal that the rows have arrived.

        Returns:
            A token; :meth:`join` waits until the sources may be written again.
        """
        ...

    def keep(self, parts: Sequence[Part], behind: Any) -> Any:
        """Queues copies of the rows that stay on this rank, behind the work that the current stream has so far.

        Args:
            parts: the parts of an exchange.
            behind: the token that :meth:`put` returned for the exchange. Copies may wait for the writes. None if no
                rows were put.

        Returns:
            A token; :meth:`join` waits until the copies are done. None if the current stream itself copies.
        """
        ...

    def join(self, token: Any) -> None:
        """Makes the current stream wait for the token of a :meth:`put`, :meth:`keep` or :meth:`beside`."""
        ...

    def arrived(self, number: int, peers: Sequence[int]) -> None:
        """Makes the current stream wait until the rows of exchange ``number`` from all ``peers`` have arrived here."""
        ...

    def beside(self, work: Callable[[], None]) -> Any:
        """Calls ``work`` with a side stream as the current stream, behind the work that was queued so far.

        Returns a token; :meth:`join` waits until the queued work is done."""
        ...

    def compute(self, work: Callable[[], None]) -> None:
        """Calls ``work``, which queues torch operations on the current stream.

        A test double may delay the call."""
        ...

    def consumed(self, number: int) -> None:
        """Signals to all peers that this rank has consumed every exchange up to ``number``.

        The signal is queued behind the work that the current stream has so far."""
        ...
