"""The interface of transports, which move rows of tensors between ranks.

A *pool* is a group of ranks that compute attention for each other. One *exchange* moves rows (along dimension 0) of
several tensors between all ranks of the pool. Implementations: ``collective.py`` and ``breakable.py`` (NCCL,
gloo), ``nvshmem/transport.py``.
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
        source: [moves.source_rows or more, ...] contiguous tensor to send rows of. Callers must not write to it until
            the exchange has ended. With ``moves.relay_before`` (see :class:`Hops`) the exchange itself first adds to
            ``source`` the gradients that other ranks of this rank's node send.
        destination: [moves.destination_rows or more, ...] contiguous tensor to fill, with the trailing shape and dtype
            of ``source``. Callers must not use it until the exchange has ended. If received rows are added up
            (``moves.reduction``), ``destination`` must hold zeros. The only exception is the first hop of gradients
            (:class:`Hops`): there ``destination`` holds the gateway's own gradients, to which others are added.
        moves: which rows of ``source`` go to which rank and row, or stay on this rank.
    """

    source: torch.Tensor
    destination: torch.Tensor
    moves: RowMoves

    def __post_init__(self) -> None:
        # Transports compute a row's address as base + number · row size.
        assert self.source.is_contiguous() and self.destination.is_contiguous()
        assert self.source.dtype == self.destination.dtype and self.source.shape[1:] == self.destination.shape[1:]


@dataclass(frozen=True)
class Hops:
    """The parts of an exchange, by *hop*: the direct way of rows from one rank to another.

    Rows of keys and values for another node may take two hops: to one rank of that node, the *gateway*, and from there
    to other ranks of that node. In backward these ranks send gradients to the gateway, which sends back the sums.

    Attributes:
        handed_on: first hop of the parts with two hops.
        others: parts with one hop, without those of which no row travels.
        second: second hop of the parts with two hops.
    """

    handed_on: tuple[Part, ...]
    others: tuple[Part, ...]
    second: tuple[Part, ...]

    @property
    def first(self) -> tuple[Part, ...]:
        return self.handed_on + self.others

    @staticmethod
    def of(parts: tuple[Part, ...]) -> Hops:
        """Splits the parts of an exchange into hops.

        With ``moves.relay_after``, a second hop goes from the gateway's ``destination`` to that of other ranks. With
        ``moves.relay_before``, a first hop goes from the ``source`` of other ranks to that of the gateway.
        """
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
    """Raises TransportError if a part was planned for another number of ranks than ``ranks``."""
    for part in parts:
        if len(part.moves.send_counts) != ranks:
            raise TransportError(
                f"The plan was made for {len(part.moves.send_counts)} ranks, but the server pool has {ranks}; "
                "plan again for this world size."
            )


def sent_by(rank: int, parts: tuple[Part, ...]) -> dict[str, Any]:
    """Returns "bytes sent" by ``rank``, and "peers": the ranks with which it exchanges rows."""
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
    def wait(self) -> None:
        """Makes the current stream wait until the exchange has ended; without a GPU the host waits."""
        ...


class Transport(Protocol):
    """Moves rows between the ranks of a pool.

    All ranks must launch the same exchanges in the same order, even if no row of a rank moves. On a GPU, a rank must
    use one stream for all launches and waits: torch's allocator reuses freed memory without waiting for other streams,
    so an exchange on a second stream could read overwritten memory.

    Attributes:
        name: "nccl", "gloo" or "nvshmem".
        rank, ranks: this rank's number in the pool, from 0, and the number of ranks in the pool.
    """

    name: str
    rank: int
    ranks: int

    def launch(self, parts: tuple[Part, ...]) -> Handle:
        """Starts an exchange, and copies rows that stay on this rank."""
        ...
