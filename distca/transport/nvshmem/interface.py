"""The fabric below the one-sided transport: memory that peers write into, and signals that streams wait for."""

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
        ranges: [N, 3] int64 on the host: source row, row in the peer's receive buffer from ``begin`` on, rows. There
            the ranges follow each other.
        rows: [sum of the ranges' rows] int64 on the device: the same as one index of source rows.
        begin: byte of the peer's receive buffer.
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
        """After the work queued so far on the current stream: once each peer has consumed exchange ``reuses``, write
        ``puts`` into its receive buffer and tell it that exchange ``number`` arrived. Returns a token for
        :meth:`join`."""
        ...

    def keep(self, parts: Sequence[Part], behind: Any) -> Any:
        """After the work queued so far on the current stream: copy the rows of ``parts`` that stay on this rank to
        their places. Returns a token for :meth:`join`, None if the current stream itself does it.

        Args:
            parts: whose rows.
            behind: the token of the put of the same exchange, which goes first; None if it puts nothing.
        """
        ...

    def join(self, token: Any) -> None:
        """Let the current stream wait for what ``token`` stands for: the sources of a put may be written again, kept
        rows are in their places, or work queued beside it is done."""
        ...

    def arrived(self, number: int, peers: Sequence[int]) -> None:
        """Let the current stream wait until exchange ``number`` arrived from ``peers``."""
        ...

    def beside(self, work: Callable[[], None]) -> Any:
        """Let ``work`` queue what it does, through this fabric, on a stream of its own behind the work queued so far on
        the current one. Returns a token for :meth:`join`."""
        ...

    def compute(self, work: Callable[[], None]) -> None:
        """Let ``work`` queue operations of torch on the current stream."""
        ...

    def consumed(self, number: int) -> None:
        """After the work queued so far on the current stream: tell all peers that this rank consumed every exchange up
        to ``number``."""
        ...
