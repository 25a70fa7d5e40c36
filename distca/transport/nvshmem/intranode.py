"""A rank's writes of rows to its *intra-node peers* (the other ranks of its node), and copies of rows that it keeps.

The receive buffers of intra-node peers are mapped, so a rank writes to them by address. *Exchanges* of rows between all
ranks are numbered. A *slot* is a 64-bit word. A sender writes an exchange's number to a slot of the receiver after the
sender's rows have *arrived*. A receiver writes the number to a slot of the sender after the receiver has *consumed* the
rows: copied them out of its receive buffer. A peer *has room* once it has consumed the rows that lie where new rows are
to be written.

Large transfers go by copy engines, which take no multiprocessor from compute. A kernel writes small or scattered rows.
Copies and the kernel have a side stream each, with these steps:

    wait until the peers have room · copy to one peer after the other · signal to all of them

A stream that switches between copies and signals leaves the copy engines idle for a while. So the stream signals to
several peers together, after 256 MiB of copies.
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
    """The limits by which a rank chooses between copy engines and kernels. Limits change speed only.

    On H200, a kernel is as fast as copy engines for up to about 16 MiB to a peer
    (benchmarks/results/transport_ways.json). A kernel takes multiprocessors from compute, so the limit is 8 MiB.

    Attributes:
        push_below_bytes: a kernel writes the rows for a peer if the rows have fewer bytes in all.
        push_below_bytes_per_range: a kernel also writes the rows for a peer if their contiguous ranges have fewer bytes
            on average. Otherwise copy engines write the rows.
        push_blocks: the largest number of the kernel's thread blocks.
        signal_after_bytes: bytes of copies after which the stream signals to the peers that it has copied to.
        keep_from_bytes: a copy engine copies rows that stay on the rank only if the rows have at least so many bytes.
        keep_from_bytes_per_range: a copy engine copies rows that stay on the rank only if their contiguous ranges have
            at least so many bytes on average. Otherwise a kernel on the computing stream copies the rows.
    """

    push_below_bytes: int = 8 << 20
    push_below_bytes_per_range: int = 128 << 10
    push_blocks: int = 96
    signal_after_bytes: int = 256 << 20
    keep_from_bytes: int = 4 << 20
    keep_from_bytes_per_range: int = 256 << 10


@dataclass(frozen=True)
class Sent:
    """A token for writes, or copies, of one exchange that are queued on side streams.

    Attributes:
        events: CUDA events that come when the writes are done.
        held: tensors that must stay alive until the writes are done.
        peers: the peers that must have room before the writes.
        reuses: number of the exchange that these peers must have consumed to have room; 0 if they have room.
    """

    events: list[Event]
    held: tuple[torch.Tensor, ...]
    peers: tuple[int, ...]
    reuses: int

    def wait(self) -> None:
        """Makes the current stream wait for the events."""
        for event in self.events:
            event.wait(torch.cuda.current_stream())


class Streams(Protocol):
    """Streams, and the kernel that writes rows. On GPUs it is the module :mod:`distca.transport.cuda_ops`."""

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
    """Streams with copy engines and signals. On GPUs it is the module :mod:`distca.transport.cuda_ops`."""

    def copy_rows(self, pieces: Sequence[tuple[int, int, np.ndarray, int]], batched: bool, stream: Any) -> None: ...
    def signal(self, addresses: np.ndarray, value: int, stream: Any) -> None: ...
    def wait_for(self, addresses: np.ndarray, value: int, stream: Any) -> None: ...


@dataclass(frozen=True)
class Addresses:
    """The addresses to which a rank writes, and the slots that it waits for.

    Array legend: R ranks. The entry of the rank itself is not used.

    Attributes:
        receive_buffers: [R] first byte of each rank's receive buffer.
        consumed_here: [R] uint64 slots on this rank. Rank r writes to slot r the number up to which it has consumed all
            exchanges.
        arrived_there: [R] uint64 slots, one on each other rank. This rank writes there the newest exchange whose rows
            it has written.
    """

    receive_buffers: Sequence[int]
    consumed_here: np.ndarray
    arrived_there: np.ndarray


class IntranodePeers:
    """One rank's writes to its intra-node peers, and copies of rows that stay on the rank.

    Args:
        addresses: addresses of receive buffers and slots.
        device: device of the rows.
        queue: streams, copy engines and signals.

    Attributes:
        policy: the limits for copy engines and kernels.
    """

    def __init__(self, addresses: Addresses, device: torch.device | str, queue: Queue = cuda_ops) -> None:
        self.policy = CopyPolicy()
        self._at, self._queue = addresses, queue
        self._streams: dict[str, Any] = {}
        self._finished_blocks = torch.zeros(1, dtype=torch.int32, device=device)
        # For each peer, the largest number of a "consumed" signal that a stream has waited for.
        self._room = dict.fromkeys(range(len(addresses.receive_buffers)), 0)
        # For each peer, the stream of the newest writes to the peer, and the event of their end.
        self._last: dict[int, tuple[Any, Any]] = {}

    def put(self, number: int, reuses: int, puts: dict[int, list[Put]]) -> Sent:
        """Queues the writes and signals of exchange ``number``, behind the current stream's work so far.

        ``puts`` are the rows to write, by peer. Writes to a peer wait until the peer has consumed exchange ``reuses``.
        """
        ready = self._queue.mark(self._queue.current_stream())
        small = {peer: pieces for peer, pieces in puts.items() if self._is_small(pieces)}
        large = {peer: pieces for peer, pieces in puts.items() if peer not in small}
        events = [self._copy(group, number, reuses, ready) for group in self._groups(large)]
        if small:
            events.append(self._push(small, number, reuses, ready))
        held = tuple(piece.source for pieces in puts.values() for piece in pieces)
        return Sent(events, held, tuple(puts), reuses)

    def keep(self, parts: Sequence[Part], behind: Sent | None) -> Sent | None:
        """Copies the rows of ``parts`` that stay on this rank.

        A copy engine copies rows in few, long ranges, after the writes of ``behind``. A kernel on the current stream
        copies other rows. Returns None if no copy engine was needed."""
        by_engine = []
        for part in parts:
            if self._is_long(part):
                by_engine.append(part)
            else:
                part.moves.copy_kept(part.source, part.destination)
        return self._keep(by_engine, behind) if by_engine else None

    def _keep(self, parts: Sequence[Part], behind: Sent | None) -> Sent:
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
        """Yields groups of peers; a stream copies to all peers of a group, and then signals to them."""
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
        stream = self._stream("push")
        # The stream waits for room. If the kernel waited, its blocks would occupy multiprocessors.
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
        """Makes a stream wait for the source rows, for the peers' room, and for earlier writes on the other stream.

        Writes to a peer must end in the order of exchanges, since the peer's slot holds only the newest number."""
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
        """Returns the side stream of a name, made on first use. A priority of -1 is above the computing stream's."""
        if name not in self._streams:
            self._streams[name] = self._queue.create_stream(priority)
        return self._streams[name]
