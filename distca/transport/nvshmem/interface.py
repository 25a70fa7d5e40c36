"""The fabric below the one-sided transport: memory that peers write into, and signals that streams wait for.

Exchanges have numbers, which are the same on every rank. A rank tells its peers by number which exchange has *arrived*
in their memory. Receivers tell senders up to which exchange they have *consumed* the rows, so that the memory is free.
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
    """Row ranges of one tensor for one peer.

    Attributes:
        source: contiguous tensor whose rows are sent.
        ranges: [N, 3] int64 on the host: source row, row in the peer's receive buffer from ``begin`` on, rows. In the
            buffer the ranges follow each other.
        rows: [sum of the ranges' rows] int64 on the device: the source rows of all ranges as one index.
        begin: byte of the peer's receive buffer from which rows are counted.
    """

    source: torch.Tensor
    ranges: np.ndarray
    rows: torch.Tensor
    begin: int

    @property
    def bytes(self) -> int:
        return len(self.rows) * self.row_bytes

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.source)


class Fabric(Protocol):
    """One-sided access to the memory of the pool's ranks. Nothing blocks the host on a GPU.

    Attributes:
        rank: this rank.
        ranks: size of the pool.
        receive_buffer: [capacity] uint8, this rank's memory that peers write into; as large on every rank.
    """

    rank: int
    ranks: int
    receive_buffer: torch.Tensor

    def put(self, number: int, reuses: int, puts: dict[int, list[Put]]) -> Any:
        """Queues the writes of exchange ``number``, behind the work queued so far on the current stream.

        Once a peer has consumed exchange ``reuses``, its ``puts`` are written into its receive buffer, and it is told
        that the exchange arrived. Returns a token for :meth:`join`."""
        ...

    def keep(self, parts: Sequence[Part], behind: Any) -> Any:
        """Queues copies of the rows of ``parts`` that stay on this rank, behind the work queued so far on the current
        stream. Returns a token for :meth:`join`, None if the current stream itself copies.

        Args:
            parts: the parts of an exchange.
            behind: the token of the put of the same exchange, which goes first; None if there is none.
        """
        ...

    def join(self, token: Any) -> None:
        """Makes the current stream wait for what ``token`` stands for: the sources of a put may be written again, kept
        rows are in their places, or work queued by :meth:`beside` is done."""
        ...

    def arrived(self, number: int, peers: Sequence[int]) -> None:
        """Makes the current stream wait until exchange ``number`` arrived from ``peers``."""
        ...

    def beside(self, work: Callable[[], None]) -> Any:
        """Calls ``work`` with a stream of its own as the current one, behind the work queued so far. Returns a token
        for :meth:`join`."""
        ...

    def compute(self, work: Callable[[], None]) -> None:
        """Calls ``work``, which queues operations of torch on the current stream."""
        ...

    def consumed(self, number: int) -> None:
        """Tells all peers, behind the work queued so far on the current stream, that this rank consumed every exchange
        up to ``number``."""
        ...
