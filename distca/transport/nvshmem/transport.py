"""The NVSHMEM transport: a rank writes rows straight into the receive buffer of the rank that needs them.

An *exchange* moves rows of several tensors (its *parts*) between all ranks of the pool. ``ReceiveRing``
(receive_ring.py) gives each exchange a number and a place in the receive buffers, alike on all ranks. The *fabric*
(interface.py) writes the rows and signals. A receiver waits until its rows have arrived, copies them to their
destinations, and signals that it has *consumed* the exchange. A sender waits only if it needs memory whose rows the
receiver has not consumed yet. Both wait on GPU streams, so the host never stops.

Between nodes keys and values take two *hops*: to one rank of a node, the *gateway*, which hands them on inside the
node. The second hop is queued at launch, too, on a side stream. The gateway's stream waits for the rows, copies them to
their destinations, and writes them to the next rank from there. Both hops share a place in the buffers, and have two
consecutive numbers.
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
"""The setting for the size of the receive buffer, for error messages."""


@dataclass(frozen=True)
class Landing:
    """One hop of an exchange, and the places where its rows land.

    Attributes:
        number: number of the exchange, or of this hop if the exchange has two.
        reuses: newest exchange that receivers must have consumed before rows may be written here.
        parts: the parts of this hop.
        begins: for each part, the byte of the receive buffer at which its rows begin.
    """

    number: int
    reuses: int
    parts: tuple[Part, ...]
    begins: list[int]

    @property
    def senders(self) -> list[int]:
        """The ranks from which this one gets rows, ascending."""
        return sorted({peer for part in self.parts for peer, rows in enumerate(part.moves.receive_counts) if rows})

    def split(self, at: int) -> tuple[Landing, Landing]:
        """Returns the first ``at`` parts, and the others."""
        return (
            replace(self, parts=self.parts[:at], begins=self.begins[:at]),
            replace(self, parts=self.parts[at:], begins=self.begins[at:]),
        )


class OneSidedTransport:
    """Moves rows by writes into other ranks' memory; implements :class:`Transport`.

    Args:
        fabric: the receive buffers and signals.
        name: name of the transport, for logs.
        fallback: transport for exchanges that do not fit into the receive buffer; without one they are refused.

    Attributes:
        fallback_exchanges: number of exchanges that the fallback transport took.
    """

    def __init__(self, fabric: Fabric, name: str, fallback: Transport | None = None) -> None:
        self.name, self.rank, self.ranks = name, fabric.rank, fabric.ranks
        self._fabric = fabric
        self.use_fallback(fallback)
        self._ring = ReceiveRing(len(fabric.receive_buffer), SETTING)

    def launch(self, parts: tuple[Part, ...]) -> Handle:
        """Starts writing all rows to their receivers, and then copying the rows that this rank keeps.

        Parts without a row that travels in the pool are only copied.

        Raises:
            TransportError: the moves were planned for another number of ranks, or the receive buffer is too small and
                there is no fallback transport; nothing was sent.
        """
        check_ranks(parts, self.ranks)
        hops = Hops.of(parts)
        if not hops.first:
            return OneSidedHandle(self, (), [], None, self._fabric.keep(parts, None))
        sizes = tuple(part.moves.most_received * row_bytes(part.source) for part in hops.first + hops.second)
        # The rings of all ranks are alike, so all ranks use the fallback for the same exchanges.
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
        """Replaces the fallback transport, which may be None, and sets the count of its exchanges to 0."""
        self._fallback, self.fallback_exchanges = fallback, 0

    def _tell(self, reason: str) -> None:
        """Counts an exchange that the fallback transport takes, and logs the first one with the ``reason``."""
        if not self.fallback_exchanges:
            assert self._fallback is not None
            logger.warning("Exchanges that do not fit go by %s, which is slower: %s", self._fallback.name, reason)
        self.fallback_exchanges += 1

    def _put(self, landing: Landing) -> Any:
        """Starts writing the rows of a hop; returns the fabric's token."""
        return self._fabric.put(landing.number, landing.reuses, self._puts(landing))

    def _puts(self, landing: Landing) -> dict[int, list[Put]]:
        """Returns the rows of a hop that this rank sends, by receiving rank."""
        puts: dict[int, list[Put]] = {}
        # Each rank begins with the next higher rank. If all began with rank 0, its link would be full at first.
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
        """Queues the second hop: waits for the first hop's rows, copies them to their places, and sends them on."""
        self._fabric.arrived(arriving.number, arriving.senders)
        self._fabric.compute(partial(self._place_received, arriving))
        tokens.append(self._put(second))

    def _place_received(self, landing: Landing) -> None:
        """Copies the rows of a hop from the receive buffer to their destinations, or adds them there."""
        for part, begin in zip(landing.parts, landing.begins, strict=True):
            rows = sum(part.moves.receive_counts)
            received = self._fabric.receive_buffer[begin : begin + rows * row_bytes(part.source)]
            packed = received.view(part.destination.dtype).view(rows, *part.destination.shape[1:])
            part.moves.place_received(packed, part.destination)

    def join(self, kept: Any) -> None:
        """Makes the current stream wait for the copies of rows that stay on this rank, if side streams copy them."""
        if kept is not None:
            self._fabric.join(kept)

    def passed(self, number: int) -> None:
        """Signals to all ranks, behind the current stream's work so far, that this rank has consumed an exchange."""
        self._fabric.consumed(self._ring.consumed(number))

    def consume(self, landings: tuple[Landing, ...], tokens: list[Any], beside: Any, kept: Any) -> None:
        """Makes the current stream wait for an exchange, copy its rows to their destinations and free its memory.

        Args:
            landings: the hops, or parts of hops, whose rows are still to be copied.
            tokens: of the writes of this rank.
            beside: token of the second hop's side stream; None without a second hop.
            kept: token of the copies of rows that stay on this rank; None if the current stream copied them.
        """
        if beside is not None:
            self._fabric.join(beside)
        # If received rows are added to kept ones, the kept rows must be in place before. Otherwise this waits for kept
        # rows last, since side streams copy them after all writes to peers.
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
    """An exchange under way."""

    _transport: OneSidedTransport
    _landings: tuple[Landing, ...]
    _tokens: list[Any]
    _beside: Any
    _kept: Any

    @property
    def works(self) -> list[Any]:
        """The tokens of this rank's writes, whose ends the timeline records."""
        return [token for token in self._tokens if hasattr(token, "wait")]

    def wait(self) -> None:
        if self._landings:
            self._transport.consume(self._landings, self._tokens, self._beside, self._kept)
        else:
            self._transport.join(self._kept)
        self._landings, self._tokens, self._beside, self._kept = (), [], None, None


@dataclass
class FallbackHandle:
    """An exchange that the fallback transport has taken; it has a number in the ring, too."""

    _transport: OneSidedTransport
    _number: int
    _handle: Handle

    @property
    def works(self) -> list[Any]:
        """The pending collectives of the fallback transport, whose ends the timeline records."""
        return getattr(self._handle, "works", [])

    def wait(self) -> None:
        self._handle.wait()
        self._transport.passed(self._number)
