"""The interface between the one-sided transport (transport.py) and the memory that it writes to, the *fabric*.

Every rank has a receive buffer into which the others, its *peers*, write rows. An *exchange* moves rows between all
ranks, and has a number that is the same on every rank. A sender signals to a peer that an exchange has *arrived*: its
rows are in the peer's buffer. A receiver signals to senders that it has *consumed* an exchange: it has copied the rows
elsewhere, so their memory may be written again. Streams wait for signals, and the host does not.

``NvshmemFabric`` (symmetric_memory.py) implements it on GPUs; a test double implements it on CPUs.
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
        ranges: [N, 3] int64 on the host. Each line is a range: first source row, first row in the peer's buffer counted
            from ``begin``, number of rows. In the buffer each range begins where the one before ends.
        rows: int64 on the device, the source rows of all ranges in order, as one index.
        begin: byte of the peer's receive buffer at which row 0 of ``ranges`` lies.
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
            reuses: an earlier exchange whose memory this one uses again. Writes to a peer wait until the peer has
                consumed it; 0 if the memory was not used before.
            puts: the rows to write, by peer. Afterwards each of these peers gets the signal that the exchange arrived.

        Returns:
            A token; :meth:`join` waits until the sources may be written again.
        """
        ...

    def keep(self, parts: Sequence[Part], behind: Any) -> Any:
        """Queues copies of the rows that stay on this rank, behind the work that the current stream has so far.

        Args:
            parts: the parts of an exchange.
            behind: the token of the exchange's :meth:`put`, whose writes go first; None without one.

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
        """Calls ``work`` with a side stream as the current one, behind the work that the current stream has so far.

        Returns a token; :meth:`join` waits until that work is done."""
        ...

    def compute(self, work: Callable[[], None]) -> None:
        """Calls ``work``, which queues torch operations on the current stream.

        A test double with simulated streams queues the call itself."""
        ...

    def consumed(self, number: int) -> None:
        """Signals to all peers that this rank has consumed every exchange up to ``number``.

        The signal is queued behind the work that the current stream has so far."""
        ...
