"""A rank's writes of rows and signals to intra-node peers, whose memory it maps; and copies of the rows that it keeps.

Large transfers go by copy engines, which take no multiprocessor from the computation beside them. Small or scattered
ones are written by one launch of a kernel. Each of both ways has a stream, on which an exchange is

    wait until the peers have room · copy to one peer after the other · signal all of them

A stream that turns from a copy to a signal and back stops the engines for a while. So peers are signalled together, or
after several hundred MiB; receivers wait for all their senders anyway. The price is that a peer which is late to make
room delays the rows of the peers in its group. It is late only when it is a whole round of the receive buffer behind,
and then those peers soon wait for its own rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from distca.device.event import Event
from distca.transport import cuda_ops
from distca.transport.cuda_ops import row_bytes
from distca.transport.interface import Part
from distca.transport.nvshmem.interface import Put


@dataclass(frozen=True)
class CopyPolicy:
    """The choice between ways to write rows. It changes speed only, so it may differ between ranks and exchanges.

    Up to about 16 MiB to a peer, a kernel is as fast as the engines, which need time to start
    (benchmarks/results/transport_ways.json). But it takes multiprocessors from the computation beside it.

    Attributes:
        push_below_bytes: rows for a peer are written by a kernel if all of them together are smaller than this.
        push_below_bytes_per_range: rows for a peer are written by a kernel, too, if their ranges are smaller than this
            on average; else a copy engine copies them.
        push_blocks: most blocks of the kernel.
        signal_after_bytes: bytes of copies to consecutive peers after which these peers are signalled.
        keep_from_bytes: rows that stay on a rank are copied by a copy engine only if all of them together are at least
            so large.
        keep_from_bytes_per_range: they must be, too, at least so large on average over their ranges; else a kernel on
            the computation's stream copies them.
    """

    push_below_bytes: int = 8 << 20
    push_below_bytes_per_range: int = 128 << 10
    push_blocks: int = 96
    signal_after_bytes: int = 256 << 20
    keep_from_bytes: int = 4 << 20
    keep_from_bytes_per_range: int = 256 << 10


@dataclass(frozen=True)
class Sent:
    """Writes or copies of one exchange under way.

    Attributes:
        events: events that come when they are done.
        held: their tensors, which live until the exchange was waited for.
        peers: the peers that had to make room first.
        reuses: the exchange that these peers had to consume for that; 0 for none.
    """

    events: list[Event]
    held: tuple[torch.Tensor, ...]
    peers: tuple[int, ...]
    reuses: int

    def wait(self) -> None:
        """Makes the current stream wait for them."""
        for event in self.events:
            event.wait(torch.cuda.current_stream())


class Streams(Protocol):
    """Streams, and the kernel that gathers rows; :mod:`distca.transport.cuda_ops` on GPUs."""

    def create_stream(self, priority: int) -> Any: ...
    def current_stream(self) -> Any: ...
    def mark(self, stream: Any) -> Any: ...
    def push_rows(
        self,
        pieces: Sequence[tuple[torch.Tensor, torch.Tensor, int]],
        arrived: np.ndarray,
        number: int,
        finished_blocks: torch.Tensor,
        most_blocks: int,
        stream: Any,
    ) -> None: ...


class Queue(Streams, Protocol):
    """Streams with copy engines, and with signals to peers whose memory is mapped."""

    def copy_rows(self, pieces: Sequence[tuple[int, int, np.ndarray, int]], batched: bool, stream: Any) -> None: ...
    def signal(self, addresses: np.ndarray, value: int, stream: Any) -> None: ...
    def wait_for(self, addresses: np.ndarray, value: int, stream: Any) -> None: ...


@dataclass(frozen=True)
class Addresses:
    """The addresses that a rank reads and writes. Array legend: R ranks; an entry of a rank's own is not used.

    Attributes:
        receive_buffers: [R] first byte of each rank's receive buffer.
        consumed_here: [R] uint64, own slots: up to which exchange each rank has consumed this rank's rows.
        arrived_there: [R] uint64, each rank's slot for the newest exchange that arrived from this rank.
    """

    receive_buffers: Sequence[int]
    consumed_here: np.ndarray
    arrived_there: np.ndarray


class IntranodePeers:
    """The queue of one rank's work for its intra-node peers, and of copies of rows that it keeps.

    Args:
        addresses: the addresses of receive buffers and slots.
        device: device of the rows.
        queue: streams, copy engines and signals.

    Attributes:
        policy: how rows are copied.
    """

    def __init__(self, addresses: Addresses, device: torch.device | str, queue: Queue = cuda_ops) -> None:
        self.policy = CopyPolicy()
        self._at, self._queue = addresses, queue
        self._streams: dict[str, Any] = {}
        self._finished_blocks = torch.zeros(1, dtype=torch.int32, device=device)
        # By peer: the newest exchange that a write to it has waited for it to consume; and the stream of the last write
        # to it, with the event of its end.
        self._room = dict.fromkeys(range(len(addresses.receive_buffers)), 0)
        self._last: dict[int, tuple[Any, Any]] = {}

    def put(self, number: int, reuses: int, puts: dict[int, list[Put]]) -> Sent:
        """See :meth:`distca.transport.nvshmem.interface.Fabric.put`."""
        ready = self._queue.mark(self._queue.current_stream())
        small = {peer: pieces for peer, pieces in puts.items() if self._is_small(pieces)}
        large = {peer: pieces for peer, pieces in puts.items() if peer not in small}
        events = [self._copy(group, number, reuses, ready) for group in self._groups(large)]
        if small:
            events.append(self._push(small, number, reuses, ready))
        held = tuple(piece.source for pieces in puts.values() for piece in pieces)
        return Sent(events, held, tuple(puts), reuses)

    def keep(self, parts: Sequence[Part], behind: Sent | None) -> Sent | None:
        """See :meth:`distca.transport.nvshmem.interface.Fabric.keep`.

        A copy engine copies few and long ranges, else a kernel on the current stream does."""
        by_engine = []
        for part in parts:
            if self._is_long(part):
                by_engine.append(part)
            else:
                part.moves.copy_kept(part.source, part.destination)
        return self._keep(by_engine, behind) if by_engine else None

    def _keep(self, parts: Sequence[Part], behind: Sent | None) -> Sent:
        """Queues copies by copy engine behind the writes to peers, for which other ranks wait."""
        stream = self._stream("keep", priority=0)
        stream.wait_event(self._queue.mark(self._queue.current_stream()))
        for event in behind.events if behind is not None else ():
            stream.wait_event(event)
        pieces = [
            (part.source.data_ptr(), part.destination.data_ptr(), part.moves.keep_ranges, row_bytes(part.source))
            for part in parts
        ]
        self._queue.copy_rows(pieces, True, stream)
        held = tuple(tensor for part in parts for tensor in (part.source, part.destination))
        peers, reuses = (behind.peers, behind.reuses) if behind is not None else ((), 0)
        return Sent([self._queue.mark(stream)], held, peers, reuses)

    def _is_long(self, part: Part) -> bool:
        ranges = len(part.moves.keep_ranges)
        least = max(self.policy.keep_from_bytes, ranges * self.policy.keep_from_bytes_per_range)
        return ranges > 0 and len(part.moves.keep_source) * row_bytes(part.source) >= least

    def _is_small(self, pieces: list[Put]) -> bool:
        ranges = sum(len(piece.ranges) for piece in pieces)
        limit = max(self.policy.push_below_bytes, ranges * self.policy.push_below_bytes_per_range)
        return bool(pieces) and sum(piece.bytes for piece in pieces) < limit

    def _groups(self, puts: dict[int, list[Put]]) -> Iterator[dict[int, list[Put]]]:
        """Returns groups of peers that are copied to and signalled together."""
        group: dict[int, list[Put]] = {}
        size = 0
        for peer, pieces in puts.items():
            group[peer] = pieces
            size += sum(piece.bytes for piece in pieces)
            if size >= self.policy.signal_after_bytes:
                yield group
                group, size = {}, 0
        if group:
            yield group

    def _copy(self, puts: dict[int, list[Put]], number: int, reuses: int, ready: Any) -> Any:
        """Queues writes to a group of peers by copy engine, and signals; returns the event of their end."""
        stream = self._stream("copy")
        self._begin(puts, stream, reuses, ready)
        for peer, pieces in puts.items():
            buffer = self._at.receive_buffers[peer]
            call = [(put.source.data_ptr(), buffer + put.begin, put.ranges, put.row_bytes) for put in pieces]
            several = sum(len(put.ranges) for put in pieces) > 1
            self._queue.copy_rows(call, several, stream)
        self._queue.signal(self._at.arrived_there[list(puts)], number, stream)
        return self._end(puts, stream)

    def _push(self, puts: dict[int, list[Put]], number: int, reuses: int, ready: Any) -> Any:
        """Queues writes by one kernel, which signals too; returns the event of their end."""
        stream = self._stream("push")
        # The stream waits for room before the kernel starts: blocks that wait would spin on multiprocessors.
        self._begin(puts, stream, reuses, ready)
        pieces = [
            (put.source, put.rows, self._at.receive_buffers[peer] + put.begin + int(put.ranges[0, 1]) * put.row_bytes)
            for peer, pieces in puts.items()
            for put in pieces
        ]
        slots = self._at.arrived_there[list(puts)]
        self._queue.push_rows(pieces, slots, number, self._finished_blocks, self.policy.push_blocks, stream)
        return self._end(puts, stream)

    def _begin(self, puts: dict[int, list[Put]], stream: Any, reuses: int, ready: Any) -> None:
        """Makes a stream wait for the rows, for the peers' room, and for earlier writes to them on the other stream.

        A slot tells only the newest exchange that arrived, so exchanges must arrive in order."""
        stream.wait_event(ready)
        for peer in puts:
            if peer in self._last and self._last[peer][0] is not stream:
                stream.wait_event(self._last[peer][1])
        late = [peer for peer in puts if self._room[peer] < reuses]
        if late:
            self._queue.wait_for(self._at.consumed_here[late], reuses, stream)
            self._room.update(dict.fromkeys(late, reuses))

    def _end(self, puts: dict[int, list[Put]], stream: Any) -> Any:
        done = self._queue.mark(stream)
        self._last.update(dict.fromkeys(puts, (stream, done)))
        return done

    def _stream(self, name: str, priority: int = -1) -> Any:
        """Returns the stream of a name, made on first use. By default its work starts before that of other streams."""
        if name not in self._streams:
            self._streams[name] = self._queue.create_stream(priority)
        return self._streams[name]
