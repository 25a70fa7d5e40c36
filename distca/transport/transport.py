"""What a transport is: it starts moving rows of several tensors at once and can be waited for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from distca.transport.rows import RowMoves


class TransportError(ValueError):
    """A transport that was asked for cannot be used here; the message says why and what to set instead."""


@dataclass(frozen=True)
class Part:
    """One tensor's share of an exchange.

    Attributes:
        source: [moves.source_rows or more, ...] rows to give away; not written until the exchange was waited for.
        destination: [moves.destination_rows or more, ...] rows to fill, same trailing shape and dtype, contiguous. If
            ``moves`` reduces, it holds zeros.
        moves: which rows go where.
    """

    source: torch.Tensor
    destination: torch.Tensor
    moves: RowMoves


class Handle(Protocol):
    """An exchange under way."""

    def wait(self) -> None:
        """Join it: work queued on the current stream from now on sees complete destinations. Does not block the host
        on a GPU."""
        ...


class Transport(Protocol):
    """Moves rows between the ranks of a server pool. Every rank of the pool launches the same exchanges in the same
    order, also those in which it has nothing to move."""

    name: str
    rank: int
    ranks: int

    def launch(self, parts: tuple[Part, ...]) -> Handle:
        """Start an exchange of all ``parts``; rows that a rank keeps are copied as part of it."""
        ...
