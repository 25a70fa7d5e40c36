"""Transport by one-sided writes: a rank copies rows straight into the receive buffer of the rank that needs them.

A receiver waits for the ranks that it gets rows from. A sender waits only where a place in the receive buffer is used
again, until the receiver has consumed its rows. Both wait on streams, so that the host never stops. A late rank thus
delays others only until its own rows arrive, and after a whole round of the ring until its memory is free.

A second hop is queued at launch too, on a stream beside the computation. There the rows that a gateway hands on are put
in their places once they arrived, and are then written to the next rank. Both hops share a place in the ring, and have
numbers of their own.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from distca.transport.cuda_ops import row_bytes
from distca.transport.interface import Handle, Hops, Part, Transport, check_ranks
from distca.transport.nvshmem.interface import Fabric, Put
from distca.transport.nvshmem.receive_ring import ReceiveRing

logger = logging.getLogger(__name__)

SETTING = "`nvshmem_buffer_gb`"


@dataclass(frozen=True)
class Landing:
    """Parts that travel at once, and where their rows land.

    Attributes:
        number: number of the exchange, or of one of its hops.
        reuses: newest exchange whose rows must have been consumed before.
        parts: parts of this hop.
        begins: byte of the receive buffer at which each part's rows begin.
    """

    number: int
    reuses: int
    parts: tuple[Part, ...]
    begins: list[int]

    @property
    def senders(self) -> list[int]:
        """Ranks that this one gets rows from."""
        return sorted({peer for part in self.parts for peer, rows in enumerate(part.moves.receive_counts) if rows})

    def split(self, at: int) -> tuple[Landing, Landing]:
        """Returns the first ``at`` parts, and the others."""
        return (
            replace(self, parts=self.parts[:at], begins=self.begins[:at]),
            replace(self, parts=self.parts[at:], begins=self.begins[at:]),
        )


class OneSidedTransport:
    """Rows by writes into peers' memory.

    Args:
        fabric: the memory and its signals.
        name: name of the transport, for logs.
        fallback: transport for exchanges that the receive buffer cannot hold; without one they are refused.

    Attributes:
        fallback_exchanges: how many exchanges the fallback transport took.
    """

    def __init__(self, fabric: Fabric, name: str, fallback: Transport | None = None) -> None:
        self.name, self.rank, self.ranks = name, fabric.rank, fabric.ranks
        self._fabric = fabric
        self.use_fallback(fallback)
        self._ring = ReceiveRing(len(fabric.receive_buffer), SETTING)

    def launch(self, parts: tuple[Part, ...]) -> Handle:
        """Starts writing the rows of all parts to their receivers, and behind them copying the rows that this rank
        keeps. Parts of which no row travels between any ranks are only copied.

        Raises:
            TransportError: the moves belong to a plan for another number of ranks, or the receive buffer is too small
                and there is no fallback transport; nothing was sent.
        """
        check_ranks(parts, self.ranks)
        hops = Hops.of(parts)
        if not hops.first:
            return OneSidedHandle(self, (), [], None, self._fabric.keep(parts, None))
        sizes = tuple(part.moves.most_received * row_bytes(part.source) for part in hops.first + hops.second)
        # Rings are the same on every rank, so all ranks use the fallback for the same exchanges.
        if self._fallback is not None and (reason := self._ring.why_not(sizes)):
            self._tell(reason)
            return FallbackHandle(self, self._ring.skip(), self._fallback.launch(parts))
        two, last = bool(hops.second), len(hops.first)
        place = self._ring.place(sizes, hops=1 + two)
        begins = [place.begin + offset for offset in place.offsets]
        first = Landing(place.number - two, place.reuses, hops.first, begins[:last])
        tokens = [self._put(first)]
        if not two:
            return OneSidedHandle(self, (first,), tokens, None, self._fabric.keep(parts, tokens[0]))
        handed_on, others = first.split(len(hops.handed_on))
        second = Landing(place.number, place.reuses, hops.second, begins[last:])
        beside = self._fabric.beside(partial(self._hand_on, handed_on, second, tokens))
        return OneSidedHandle(self, (others, second), tokens, beside, self._fabric.keep(parts, tokens[0]))

    def use_fallback(self, fallback: Transport | None) -> None:
        """Replaces the fallback transport, which may be None, and counts its exchanges anew."""
        self._fallback, self.fallback_exchanges = fallback, 0

    def _tell(self, reason: str) -> None:
        """Counts an exchange that the fallback transport takes; the first one is logged."""
        if not self.fallback_exchanges:
            assert self._fallback is not None
            logger.warning("Exchanges that do not fit go by %s, which is slower: %s", self._fallback.name, reason)
        self.fallback_exchanges += 1

    def _put(self, landing: Landing) -> Any:
        """Starts writing the rows of a hop; returns its token."""
        return self._fabric.put(landing.number, landing.reuses, self._puts(landing))

    def _puts(self, landing: Landing) -> dict[int, list[Put]]:
        puts: dict[int, list[Put]] = {}
        # Every rank begins with its right-hand neighbour, so that not all write to the same one first.
        for peer in ((self.rank + step) % self.ranks for step in range(1, self.ranks)):
            mine = [
                Put(part.source, *part.moves.sent_to(peer), begin)
                for part, begin in zip(landing.parts, landing.begins, strict=True)
                if peer in part.moves.send_ranges
            ]
            if mine:
                puts[peer] = mine
        return puts

    def _hand_on(self, arriving: Landing, second: Landing, tokens: list[Any]) -> None:
        """Queues the second hop behind the arrival of the rows that it hands on."""
        self._fabric.arrived(arriving.number, arriving.senders)
        self._fabric.compute(partial(self._place_received, arriving))
        tokens.append(self._put(second))

    def _place_received(self, landing: Landing) -> None:
        for part, begin in zip(landing.parts, landing.begins, strict=True):
            rows = sum(part.moves.receive_counts)
            received = self._fabric.receive_buffer[begin : begin + rows * row_bytes(part.source)]
            packed = received.view(part.destination.dtype).view(rows, *part.destination.shape[1:])
            part.moves.place_received(packed, part.destination)

    def join(self, kept: Any) -> None:
        """Makes the current stream wait for rows that stayed on this rank."""
        if kept is not None:
            self._fabric.join(kept)

    def passed(self, number: int) -> None:
        """Tells senders, behind the current stream's work so far, that an exchange's rows are in their places."""
        self._fabric.consumed(self._ring.consumed(number))

    def consume(self, landings: tuple[Landing, ...], tokens: list[Any], beside: Any, kept: Any) -> None:
        """Waits on the current stream for an exchange, puts its rows in their places and frees its memory."""
        if beside is not None:
            self._fabric.join(beside)
        # Where rows are added up, kept rows must be in place before received ones are added to them. Elsewhere both
        # have different places, and kept rows, which are copied after all writes to peers, are waited for last.
        adds = any(part.moves.reduction is not None for landing in landings for part in landing.parts)
        for landing in landings:
            self._fabric.arrived(landing.number, landing.senders)
            if adds:
                self.join(kept)
                kept = None
            self._place_received(landing)
        self.passed(landings[-1].number)
        for token in tokens:
            self._fabric.join(token)
        self.join(kept)


@dataclass
class OneSidedHandle:
    """Writes under way."""

    _transport: OneSidedTransport
    _landings: tuple[Landing, ...]
    _tokens: list[Any]
    _beside: Any
    _kept: Any

    @property
    def works(self) -> list[Any]:
        """The tokens of this rank's writes, for whoever records when they end."""
        return [token for token in self._tokens if hasattr(token, "wait")]

    def wait(self) -> None:
        if self._landings:
            self._transport.consume(self._landings, self._tokens, self._beside, self._kept)
        else:
            self._transport.join(self._kept)
        self._landings, self._tokens, self._beside, self._kept = (), [], None, None


@dataclass
class FallbackHandle:
    """An exchange that the fallback transport took; it has a number in the ring, too."""

    _transport: OneSidedTransport
    _number: int
    _handle: Handle

    @property
    def works(self) -> list[Any]:
        """The works of the fallback transport."""
        return getattr(self._handle, "works", [])

    def wait(self) -> None:
        self._handle.wait()
        self._transport.passed(self._number)
