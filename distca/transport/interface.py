"""The interface of transports: they start moving rows of several tensors at once and can be waited for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from distca.errors import TransportError
from distca.transport.row_moves import RowMoves


@dataclass(frozen=True)
class Part:
    """One tensor's part of an exchange.

    Attributes:
        source: [moves.source_rows or more, ...] rows to send, contiguous. Callers must not write them until the
            exchange was waited for; only ``moves.relay_before`` adds to them.
        destination: [moves.destination_rows or more, ...] rows to fill, contiguous, of the same trailing shape and
            dtype. Callers must neither read nor write them until then. Where ``moves`` reduces, they begin as zeros.
        moves: which rows go where.
    """

    source: torch.Tensor
    destination: torch.Tensor
    moves: RowMoves

    def __post_init__(self) -> None:
        # Rows are found by address, so other memory would be sent if the tensors were not contiguous.
        assert self.source.is_contiguous() and self.destination.is_contiguous()
        assert self.source.dtype == self.destination.dtype and self.source.shape[1:] == self.destination.shape[1:]


@dataclass(frozen=True)
class Hops:
    """The parts of an exchange by hop; parts of which no row travels are left out.

    Attributes:
        handed_on: parts of the first hop whose rows must be in their places before the second hop.
        others: parts that travel at once and have no second hop.
        second: parts of the second hop; empty for most exchanges.
    """

    handed_on: tuple[Part, ...]
    others: tuple[Part, ...]
    second: tuple[Part, ...]

    @property
    def first(self) -> tuple[Part, ...]:
        """All parts that travel at once; those that the second hop waits for come first."""
        return self.handed_on + self.others

    @staticmethod
    def of(parts: tuple[Part, ...]) -> Hops:
        """The hops of an exchange."""
        handed_on, others, second = [], [], []
        for part in parts:
            before, after = part.moves.relay_before, part.moves.relay_after
            if before is not None:
                handed_on.append(Part(part.source, part.source, before))
                second.append(part)
            elif after is not None:
                handed_on.append(part)
                second.append(Part(part.destination, part.destination, after))
            elif part.moves.travelling:
                others.append(part)
        return Hops(tuple(handed_on), tuple(others), tuple(second))


def check_ranks(parts: tuple[Part, ...], ranks: int) -> None:
    """Raises TransportError if the moves belong to a plan for another number of ranks."""
    for part in parts:
        if len(part.moves.send_counts) != ranks:
            raise TransportError(
                f"The plan was made for {len(part.moves.send_counts)} ranks, but the server pool has {ranks}; "
                "plan again for this world size."
            )


def sent_by(rank: int, parts: tuple[Part, ...]) -> dict[str, Any]:
    """Returns the bytes that an exchange sends from this rank, and the peers that it sends to or receives from."""
    sent = 0
    peers: set[int] = set()
    hops = Hops.of(parts)
    for part in hops.first + hops.second:
        row_bytes = part.source.element_size() * math.prod(part.source.shape[1:])
        sent += sum(part.moves.send_counts) * row_bytes
        counts = zip(part.moves.send_counts, part.moves.receive_counts, strict=True)
        peers |= {peer for peer, both in enumerate(counts) if any(both) and peer != rank}
    return {"bytes sent": sent, "peers": sorted(peers)}


class Handle(Protocol):
    """An exchange under way."""

    def wait(self) -> None:
        """Joins the exchange: work queued on the current stream from now on sees complete destinations. On a GPU the
        host does not block."""
        ...


class Transport(Protocol):
    """Moves rows between the ranks of a server pool.

    Every rank of the pool must launch the same exchanges in the same order, also those in which it has nothing to move.
    On a GPU a rank must launch and wait on the same stream, and wait for all exchanges that it launched: the memory of
    parts is used again in the order of that stream.
    """

    name: str
    rank: int
    ranks: int

    def launch(self, parts: tuple[Part, ...]) -> Handle:
        """Starts an exchange of all ``parts``; rows that a rank keeps are copied as a part of it."""
        ...
