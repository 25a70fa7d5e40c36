"""Writes a rank's rows to its *intra-node peers* (the other ranks of its node), and copies rows that stay on the rank.

- receive buffer: the memory of a rank into which its peers write.
- hop: one movement of rows between all ranks. Hops are numbered 1, 2, 3 and so on.
- slot: a 64-bit word in a rank's memory. To signal, a peer writes a hop's number into the slot.
- "arrived": with this signal a sender says that the hop's rows are in the receive buffer.
- "consumed": with this signal a receiver says that it has copied the hop's rows out of the receive buffer.
- room: a peer has room for new rows when it has consumed the old rows in the same place of its receive buffer.

Copy engines make large transfers, and take no multiprocessors from compute. A kernel writes small or scattered rows.
Writes by copy engines and writes by the kernel have a side stream each, with these steps:

    wait until the peers have room · write to one peer after the other · signal "arrived" to all of them
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
    """Limits by which a rank chooses between copy engines and kernels.

    ``push_below_bytes`` was measured on H200: up to about 16 MiB to a peer, a kernel is as fast as copy engines
    (benchmarks/results/transport_ways.json). Kernels take multiprocessors from compute, so 8 MiB were chosen.

    Attributes:
        push_below_bytes: a kernel writes the rows for a peer if they have fewer bytes than this in all.
        push_below_bytes_per_range: a kernel also writes them if their ranges have fewer bytes than this on average.
        push_blocks: the largest number of the kernel's thread blocks. 32, 64 and 96 were measured.
        signal_after_bytes: the stream of copy engines signals "arrived" after at least this many bytes, and at the end.
            Copy engines are idle for a while when their stream signals.
        keep_from_bytes: a kernel copies those rows of a part that stay on the rank, if they have fewer bytes than this.
        keep_from_bytes_per_range: a kernel also copies them if their ranges have fewer bytes than this on average.
    """

    push_below_bytes: int = 8 << 20
    push_below_bytes_per_range: int = 128 << 10
    push_blocks: int = 96
    signal_after_bytes: int = 256 << 20
    keep_from_bytes: int = 4 << 20
    keep_from_bytes_per_range: int = 256 << 10


@dataclass(frozen=True)
class Sent:
    """One hop's writes or copies, which are queued on side streams.

    Attributes:
        events: CUDA events, at the ends of all writes or copies.
        held: tensors that must stay alive until the events occur.
        peers: the peers to which the writes go; for copies, the peers of the writes before them.
        reuses: the writes begin once ``peers`` have consumed all hops up to this number, because the writes reuse these
            hops' place in receive buffers. 0 for no wait.
    """

    events: list[Event]
    held: tuple[torch.Tensor, ...]
    peers: tuple[int, ...]
    reuses: int

    def wait(self) -> None:
        for event in self.events:
            event.wait(torch.cuda.current_stream())


class Streams(Protocol):
    """Streams, and the kernel that writes rows; on GPUs the module :mod:`distca.transport.cuda_ops`."""

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
    """Streams with copy engines and signals; on GPUs the module :mod:`distca.transport.cuda_ops`."""

    def copy_rows(self, pieces: Sequence[tuple[int, int, np.ndarray, int]], batched: bool, stream: Any) -> None: ...
    def signal(self, addresses: np.ndarray, value: int, stream: Any) -> None: ...
    def wait_for(self, addresses: np.ndarray, value: int, stream: Any) -> None: ...


@dataclass(frozen=True)
class Addresses:
    """Addresses of receive buffers and slots.

    Attributes:
        receive_buffers: [ranks] address of each rank's receive buffer.
        consumed_here: [ranks] uint64 addresses of slots on this rank; rank r signals "consumed" to slot r.
        arrived_there: [ranks] uint64 addresses of slots, one on each rank, to which this rank signals "arrived".
    """

    receive_buffers: Sequence[int]
    consumed_here: np.ndarray
    arrived_there: np.ndarray


class IntranodePeers:
    def __init__(self, addresses: Addresses, device: torch.device | str, queue: Queue = cuda_ops) -> None:
        self.policy = CopyPolicy()
        self._at, self._queue = addresses, queue
        self._streams: dict[str, Any] = {}
        self._finished_blocks = torch.zeros(1, dtype=torch.int32, device=device)
        # By peer, the newest "consumed" signal that a stream has waited for.
        self._room = dict.fromkeys(range(len(addresses.receive_buffers)), 0)
        # By peer, the stream of the newest writes and the event of their end.
        self._last: dict[int, tuple[Any, Any]] = {}

    def put(self, number: int, reuses: int, puts: dict[int, list[Put]]) -> Sent:
        """Queues the writes and signals of hop ``number``, behind what the current stream has queued so far.

        ``puts`` has the rows for each peer. Writes to a peer wait until it has consumed all hops up to ``reuses``."""
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

        If the rows of a part are in few, long ranges, copy engines (kernels before CUDA 13) copy them after the writes
        ``behind``. A kernel on the current stream copies other parts. Returns the copies of the copy engines;
        None if there are none."""
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
        # The stream waits for room, because a kernel that waited would occupy multiprocessors.
        self._begin(puts, stream, reuses, ready)
        # ranges[0, 1] is the first row at the peer, counted from put.begin.
        pieces = [
            (put.source, put.rows, self._at.receive_buffers[peer] + put.begin + int(put.ranges[0, 1]) * put.row_bytes)
            for peer, pieces in puts.items()
            for put in pieces
        ]
        slots = self._at.arrived_there[list(puts)]
        self._queue.push_rows(pieces, slots, number, self._finished_blocks, self.policy.push_blocks, stream)
        return self._end(puts, stream)

    def _begin(self, puts: dict[int, list[Put]], stream: Any, reuses: int, ready: Any) -> None:
        """Makes a stream wait for the source rows, for the peers' room, and for earlier writes on the other stream."""
        stream.wait_event(ready)
        # Writes to a peer must end in the order of hops, because the peer's slot holds only the newest number.
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
        # Priority -1 is above the computing stream's.
        if name not in self._streams:
            self._streams[name] = self._queue.create_stream(priority)
        return self._streams[name]
