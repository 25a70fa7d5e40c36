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
    """One tensor's share of an exchange.

    Attributes:
        source: [moves.source_rows or more, ...] rows to give away, contiguous; not written until the exchange was
            waited for, but by a relay before, which adds to rows of it.
        destination: [moves.destination_rows or more, ...] rows to fill, same trailing shape and dtype, contiguous;
            neither read nor written until then. If ``moves`` reduces, it holds zeros.
        moves: which rows go where.
    """

    source: torch.Tensor
    destination: torch.Tensor
    moves: RowMoves

    def __post_init__(self) -> None:
        # Rows are found by address: whatever else lay there would be sent without a word.
        assert self.source.is_contiguous() and self.destination.is_contiguous()
        assert self.source.dtype == self.destination.dtype and self.source.shape[1:] == self.destination.shape[1:]


@dataclass(frozen=True)
class Hops:
    """Parts of an exchange in the order in which rows travel; those of which no row travels are left out.

    Attributes:
        handed_on: at once; their rows must be in their places before the second hop.
        others: at once.
        second: then; empty for most exchanges.
    """

    handed_on: tuple[Part, ...]
    others: tuple[Part, ...]
    second: tuple[Part, ...]

    @property
    def first(self) -> tuple[Part, ...]:
        """All that travels at once, what is waited for first."""
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
    """Raise TransportError if the moves belong to a plan for another number of ranks."""
    for part in parts:
        if len(part.moves.send_counts) != ranks:
            raise TransportError(
                f"The plan was made for {len(part.moves.send_counts)} ranks, but the server pool has {ranks}; "
                "plan again for this world size."
            )


def sent_by(rank: int, parts: tuple[Part, ...]) -> dict[str, Any]:
    """Returns the bytes that an exchange sends from this rank in all, and the peers that get or give some."""
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
        """Join it: work queued on the current stream from now on sees complete destinations. Does not block the host
        on a GPU."""
        ...


class Transport(Protocol):
    """Moves rows between the ranks of a server pool. Every rank of the pool launches the same exchanges in the same
    order, also those in which it has nothing to move.

    On a GPU a rank launches and waits on one and the same stream, and waits for everything that it launched: memory of
    parts is used again in the order of that stream.
    """

    name: str
    rank: int
    ranks: int

    def launch(self, parts: tuple[Part, ...]) -> Handle:
        """Start an exchange of all ``parts``; rows that a rank keeps are copied as part of it."""
        ...
