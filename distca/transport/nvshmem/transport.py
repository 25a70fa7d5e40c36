"""Transport by one-sided writes: a rank copies rows straight into the receive buffer of the rank that needs them.

A sender waits for nobody but, when a place is used again, for the receiver to have emptied it; a receiver waits for the
ranks that it gets rows from. Both waits are on streams: the host never stops. A rank that is late, or that only sends,
therefore holds up others no longer than its own rows and, after a whole round of the ring, its place in memory.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from distca.errors import TransportError
from distca.transport.cuda_ops import row_bytes
from distca.transport.interface import Handle, Part, Transport
from distca.transport.nvshmem.interface import Fabric, Put
from distca.transport.nvshmem.receive_ring import ReceiveRing, RingPlace

logger = logging.getLogger(__name__)

SETTING = "`nvshmem_buffer_gb`"


class OneSidedTransport:
    """Rows by writes into peers' memory.

    Args:
        fabric: the memory and its signals.
        name: for logs.
        fallback: takes an exchange that the receive buffer cannot hold; without one it is refused.

    Attributes:
        fallback_exchanges: how many exchanges the fallback transport took.
    """

    def __init__(self, fabric: Fabric, name: str, fallback: Transport | None = None) -> None:
        self.name, self.rank, self.ranks = name, fabric.rank, fabric.ranks
        self._fabric = fabric
        self.use_fallback(fallback)
        self._ring = ReceiveRing(len(fabric.receive_buffer), SETTING)

    def launch(self, parts: tuple[Part, ...]) -> Handle:
        """Start writing the rows of all parts to their receivers, and behind them copying the rows that this rank
        keeps; parts of which no row travels between any ranks are only copied.

        Raises:
            TransportError: the moves belong to a plan for another number of ranks, or the receive buffer is too small
                and there is no fallback transport; nothing was sent.
        """
        for part in parts:
            if len(part.moves.send_counts) != self.ranks:
                raise TransportError(
                    f"The plan was made for {len(part.moves.send_counts)} ranks, but the server pool has {self.ranks}; "
                    "plan again for this world size."
                )
        travelling = tuple(part for part in parts if part.moves.travelling)
        place = token = None
        if travelling:
            sizes = tuple(part.moves.most_received * row_bytes(part.source) for part in travelling)
            # Every rank keeps the same books, so all send this one the same way.
            if self._fallback is not None and (reason := self._ring.why_not(sizes)):
                self._tell(reason)
                return FallbackHandle(self, self._ring.skip(), self._fallback.launch(parts))
            place = self._ring.place(sizes)
            token = self._fabric.put(place.number, place.reuses, self._puts(travelling, place))
        kept = self._fabric.keep(parts, token)
        return OneSidedHandle(self, place, travelling, token, kept)

    def use_fallback(self, fallback: Transport | None) -> None:
        """Take another fallback transport, or none, and count anew."""
        self._fallback, self.fallback_exchanges = fallback, 0

    def _tell(self, reason: str) -> None:
        """Count an exchange that the fallback transport takes; the first one is said."""
        if not self.fallback_exchanges:
            assert self._fallback is not None
            logger.warning("Exchanges that do not fit go by %s, which is slower: %s", self._fallback.name, reason)
        self.fallback_exchanges += 1

    def _puts(self, parts: tuple[Part, ...], place: RingPlace) -> dict[int, list[Put]]:
        puts: dict[int, list[Put]] = {}
        # Every rank begins with its right-hand neighbour, so that not all write to the same one first.
        for peer in ((self.rank + step) % self.ranks for step in range(1, self.ranks)):
            mine = [
                Put(part.source, *part.moves.sent_to(peer), place.begin + offset)
                for part, offset in zip(parts, place.offsets, strict=True)
                if peer in part.moves.send_ranges
            ]
            if mine:
                puts[peer] = mine
        return puts

    def join(self, kept: Any) -> None:
        """Let the current stream wait for rows that stayed on this rank."""
        if kept is not None:
            self._fabric.join(kept)

    def passed(self, number: int) -> None:
        """Tell senders, behind what the current stream did, that an exchange's rows are in their places."""
        self._fabric.consumed(self._ring.consumed(number))

    def consume(self, place: RingPlace, parts: tuple[Part, ...], token: Any, kept: Any) -> None:
        """Wait on the current stream for an exchange, put its rows in their places and free its memory."""
        senders = {peer for part in parts for peer, rows in enumerate(part.moves.receive_counts) if rows}
        self._fabric.arrived(place.number, sorted(senders))
        # Received rows are added to kept ones or, where nothing is added up, have other places. Then the kept ones,
        # which are copied after all writes to peers, are waited for last.
        adds = any(part.moves.reduction is not None for part in parts)
        if adds:
            self.join(kept)
        for part, offset in zip(parts, place.offsets, strict=True):
            rows = sum(part.moves.receive_counts)
            begin = place.begin + offset
            received = self._fabric.receive_buffer[begin : begin + rows * row_bytes(part.source)]
            packed = received.view(part.destination.dtype).view(rows, *part.destination.shape[1:])
            part.moves.place_received(packed, part.destination)
        self.passed(place.number)
        self._fabric.join(token)
        if not adds:
            self.join(kept)


@dataclass
class OneSidedHandle:
    """Writes under way."""

    _transport: OneSidedTransport
    _place: RingPlace | None
    _parts: tuple[Part, ...]
    _token: Any
    _kept: Any

    @property
    def works(self) -> list[Any]:
        """What can be waited for to know when this rank's own writes end, for whoever records that."""
        return [self._token] if self._token is not None and hasattr(self._token, "wait") else []

    def wait(self) -> None:
        if self._place is not None:
            self._transport.consume(self._place, self._parts, self._token, self._kept)
        else:
            self._transport.join(self._kept)
        self._place, self._parts, self._token, self._kept = None, (), None, None


@dataclass
class FallbackHandle:
    """An exchange that the fallback transport took; it has a number among those of the ring."""

    _transport: OneSidedTransport
    _number: int
    _handle: Handle

    @property
    def works(self) -> list[Any]:
        """Of the fallback transport."""
        return getattr(self._handle, "works", [])

    def wait(self) -> None:
        self._handle.wait()
        self._transport.passed(self._number)
