"""The interface of transports, which move rows of tensors between ranks.

The *home* of a row is the rank that holds it between layers; a *server* is a rank that computes attention with it. Rows
go from homes to servers, and results come back. One *exchange* moves rows of several tensors between all ranks of the
pool, and each tensor is a :class:`Part` of it. Calls of layers (``distca/runtime``) launch exchanges and wait for them
later. Implementations: ``collective.py`` (NCCL, gloo) and ``nvshmem/transport.py``.
"""

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
        source: [moves.source_rows or more, ...] tensor to send rows of, contiguous. Callers must not write it until
            they have waited for the exchange. The exchange itself only writes it for ``moves.relay_before``, which adds
            gradients of other ranks to this rank's rows before they are sent.
        destination: [moves.destination_rows or more, ...] tensor to fill, contiguous, of the same trailing shape and
            dtype. Callers must neither read nor write it until they have waited. It must hold zeros at first if
            ``moves.reduction`` adds rows up.
        moves: the rows of both tensors that move, and the ranks between which they move.
    """

    source: torch.Tensor
    destination: torch.Tensor
    moves: RowMoves

    def __post_init__(self) -> None:
        # Transports compute a row's address as base + number · row size, which is right for contiguous tensors only.
        assert self.source.is_contiguous() and self.destination.is_contiguous()
        assert self.source.dtype == self.destination.dtype and self.source.shape[1:] == self.destination.shape[1:]


@dataclass(frozen=True)
class Hops:
    """The parts of an exchange, by hop. Parts without a row that travels between ranks are left out.

    Between nodes, keys and values go to one rank of the node (the *gateway*) first, which hands them on: two hops. On
    the way back, servers send gradients to their gateway, which adds them up and sends the sums home.

    Attributes:
        handed_on: first hop of the parts that have two.
        others: parts that have one hop; they travel together with ``handed_on``.
        second: second hop of the parts in ``handed_on``, which needs their rows; empty for most exchanges.
    """

    handed_on: tuple[Part, ...]
    others: tuple[Part, ...]
    second: tuple[Part, ...]

    @property
    def first(self) -> tuple[Part, ...]:
        """All parts that travel at launch; those that the second hop needs come first."""
        return self.handed_on + self.others

    @staticmethod
    def of(parts: tuple[Part, ...]) -> Hops:
        """Splits the parts of an exchange into hops."""
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
    """Raises TransportError if a part's moves were planned for another number of ranks."""
    for part in parts:
        if len(part.moves.send_counts) != ranks:
            raise TransportError(
                f"The plan was made for {len(part.moves.send_counts)} ranks, but the server pool has {ranks}; "
                "plan again for this world size."
            )


def sent_by(rank: int, parts: tuple[Part, ...]) -> dict[str, Any]:
    """Returns for the timeline the bytes that this rank sends, and the ranks that it sends to or receives from."""
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
        """Waits for the exchange: work queued on the current stream after this call sees filled destinations.

        On a GPU the stream waits, and the host does not."""
        ...


class Transport(Protocol):
    """Moves rows between the ranks of a pool.

    Every rank must launch the same exchanges in the same order, even if none of its own rows move. On a GPU, a rank
    must launch all exchanges and wait for them on one stream. Torch's allocator gives the memory of tensors to later
    work of that stream, so an exchange that nobody waited for could overwrite it.

    Attributes:
        name: "nccl", "gloo" or "nvshmem", for logs.
        rank: this rank's number in the pool.
        ranks: number of ranks in the pool.
    """

    name: str
    rank: int
    ranks: int

    def launch(self, parts: tuple[Part, ...]) -> Handle:
        """Starts an exchange of all ``parts``. Rows whose home and server are this rank are copied, too."""
        ...
