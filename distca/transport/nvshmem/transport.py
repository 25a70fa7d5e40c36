"""The NVSHMEM transport: a rank writes rows straight into the receive buffers of other ranks.

An *exchange* is one movement of rows between all ranks, and a *part* is one tensor's rows in the exchange. An exchange
uses the same bytes of the receive buffer on every rank. A receiver *consumes* an exchange: it copies the rows out of
its buffer to their destination tensors.

Rows for another node may take two *hops*: to one rank of that node, and from there to other ranks of that node.
Gradients take these hops in reverse. All hops are numbered 1, 2, 3 and so on in launch order, equally on all ranks.
"""

from __future__ import annotations

import logging
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from distca.errors import TransportError
from distca.transport.cuda_ops import row_bytes
from distca.transport.interface import Handle, Hops, Part, Transport, check_ranks
from distca.transport.nvshmem.interface import Fabric, Put
from distca.transport.nvshmem.receive_ring import ReceiveRing

logger = logging.getLogger(__name__)

_SETTING = "`nvshmem_buffer_gb`"


@dataclass(frozen=True)
class Landing:
    """All parts of one hop of an exchange, or some of these parts.

    Attributes:
        number: the hop's number.
        reuses: a rank writes to a receiver once the receiver has consumed all hops up to this number; 0 for no wait.
        begins: for each part, the first byte of its rows in the receive buffer.
    """

    number: int
    reuses: int
    parts: tuple[Part, ...]
    begins: list[int]

    @property
    def senders(self) -> list[int]:
        return sorted({peer for part in self.parts for peer, rows in enumerate(part.moves.receive_counts) if rows})

    def split(self, at: int) -> tuple[Landing, Landing]:
        return (
            replace(self, parts=self.parts[:at], begins=self.begins[:at]),
            replace(self, parts=self.parts[at:], begins=self.begins[at:]),
        )


class OneSidedTransport:
    """Moves rows by writes into other ranks' memory.

    Args:
        fabric: the receive buffers of all ranks, and the signals by which ranks wait for each other.
        fallback: transport for exchanges that get no place in the receive buffer (``receive_ring.py``), or whose rows
            the fabric cannot write. With None, they raise TransportError.

    Attributes:
        waits_at_once: whether callers wait for an exchange right after its launch. If True, a kernel copies the rows
            that stay here, while other rows travel. If False, copy engines may copy the rows that stay, after those
            that travel. Copy engines take no multiprocessor from what is computed meanwhile.
        fallback_exchanges: number of exchanges by the fallback since :meth:`use_fallback` was last called.
    """

    def __init__(self, fabric: Fabric, name: str, fallback: Transport | None = None) -> None:
        self.name, self.rank, self.ranks = name, fabric.rank, fabric.ranks
        self._fabric = fabric
        self.waits_at_once = False
        self.use_fallback(fallback)
        self._ring = ReceiveRing(len(fabric.receive_buffer), _SETTING)

    def launch(self, parts: tuple[Part, ...]) -> Handle:
        """Starts to write rows to their receivers, and to copy the rows that stay on this rank.

        Raises:
            TransportError: ``parts`` were planned for another number of ranks; or they get no place in the receive
                buffer or have too long rows, and there is no fallback transport. In all cases nothing was sent.
        """
        check_ranks(parts, self.ranks)
        hops = Hops.of(parts)
        if not hops.first:
            return OneSidedHandle(self, (), [], None, self._keep(parts, None))
        travelling = hops.first + hops.second
        sizes = tuple(part.moves.most_received * row_bytes(part.source) for part in travelling)
        longest = max(row_bytes(part.source) for part in travelling)
        # ``sizes``, ``longest`` and the ring's bytes in use are equal on all ranks. So all ranks use the fallback, or
        # none does.
        if reason := self._fabric.why_not_row(longest) or self._ring.why_not(sizes):
            if self._fallback is None:
                raise TransportError(reason)
            self._note_fallback(reason)
            return FallbackHandle(self, self._ring.skip(), self._fallback.launch(parts))
        two, last = bool(hops.second), len(hops.first)
        # ``place.number`` is the number of the last hop.
        place = self._ring.place(sizes, hops=1 + two)
        begins = [place.begin + offset for offset in place.offsets]
        first = Landing(place.number - two, place.reuses, hops.first, begins[:last])
        tokens = [self._put(first)]
        if not two:
            return OneSidedHandle(self, (first,), tokens, None, self._keep(parts, tokens[0]))
        # Rows of the parts ``handed_on`` go to other ranks in the second hop, which runs on a side stream.
        handed_on, others = first.split(len(hops.handed_on))
        second = Landing(place.number, place.reuses, hops.second, begins[last:])
        beside = self._fabric.beside(partial(self._hand_on, handed_on, second, tokens))
        return OneSidedHandle(self, (others, second), tokens, beside, self._keep(parts, tokens[0]))

    def for_another(self, fallback: Transport | None, waits_at_once: bool) -> OneSidedTransport:
        """Returns a transport for another user of the same memory. One sequence numbers the hops of both users."""
        other = copy(self)
        other.waits_at_once = waits_at_once
        other.use_fallback(fallback)
        return other

    def use_fallback(self, fallback: Transport | None) -> None:
        """Replaces the fallback transport, and sets ``fallback_exchanges`` to 0."""
        self._fallback, self.fallback_exchanges = fallback, 0

    def _note_fallback(self, reason: str) -> None:
        if not self.fallback_exchanges:
            assert self._fallback is not None
            logger.warning(
                "Exchanges that do not fit NVSHMEM's memory go by %s, which is slower: %s", self._fallback.name, reason
            )
        self.fallback_exchanges += 1

    def _keep(self, parts: tuple[Part, ...], behind: Any) -> Any:
        if not self.waits_at_once:
            return self._fabric.keep(parts, behind)
        for part in parts:
            self._fabric.compute(partial(part.moves.copy_kept, part.source, part.destination))
        return None

    def _put(self, landing: Landing) -> Any:
        return self._fabric.put(landing.number, landing.reuses, self._puts(landing))

    def _puts(self, landing: Landing) -> dict[int, list[Put]]:
        puts: dict[int, list[Put]] = {}
        # Each rank begins with the next higher rank, so that ranks do not all write to one rank at once.
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
        if kept is not None:
            self._fabric.join(kept)

    def signal_consumed(self, number: int) -> None:
        self._fabric.consumed(self._ring.consumed(number))

    def consume(self, landings: tuple[Landing, ...], tokens: list[Any], beside: Any, kept: Any) -> None:
        """Makes the current stream wait for an exchange, and copy its rows to their destinations.

        Args:
            landings: each hop, with the parts to copy here. The side stream copies the parts that are handed on.
            tokens: for each hop, what :meth:`Fabric.join` needs to wait for this rank's writes.
            beside: the same for the side stream of a second hop; None without one.
            kept: the same for the copies of rows that stay on this rank; None for no wait.
        """
        if beside is not None:
            self._fabric.join(beside)
        # Received rows may be added to rows that stay on this rank, so the rows that stay must be copied first.
        adds = any(part.moves.reduction is not None for landing in landings for part in landing.parts)
        for landing in landings:
            self._fabric.arrived(landing.number, landing.senders)
            if adds:
                self.join(kept)
                kept = None
            self._place_received(landing)
        self.signal_consumed(landings[-1].number)
        for token in tokens:
            self._fabric.join(token)
        self.join(kept)


@dataclass
class OneSidedHandle:
    _transport: OneSidedTransport
    _landings: tuple[Landing, ...]
    _tokens: list[Any]
    _beside: Any
    _kept: Any

    @property
    def works(self) -> list[Any]:
        """The tokens of this rank's writes, for the timeline, which records when they end; empty in tests on CPUs."""
        return [token for token in self._tokens if hasattr(token, "wait")]

    def wait(self) -> None:
        if self._landings:
            self._transport.consume(self._landings, self._tokens, self._beside, self._kept)
        else:
            self._transport.join(self._kept)
        self._landings, self._tokens, self._beside, self._kept = (), [], None, None


@dataclass
class FallbackHandle:
    """An exchange by the fallback transport. It takes the number of a hop, which :meth:`wait` signals as consumed."""

    _transport: OneSidedTransport
    _number: int
    _handle: Handle

    @property
    def works(self) -> list[Any]:
        return getattr(self._handle, "works", [])

    def wait(self) -> None:
        self._handle.wait()
        self._transport.signal_consumed(self._number)
