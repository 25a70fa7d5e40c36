"""Writes of a rank to intra-node peers, whose memory it maps: rows, signals; and copies of the rows that it keeps.

Large things are copied by copy engines, which take no multiprocessor from the computation beside them; what is small or
scattered is written by one launch of a kernel. An exchange goes, on a stream of its own kind,

    wait until the peers have room · copy to one peer after the other · signal all of them

A stream that turns from a copy to a signal and back stops the engines for a while. So that is done once for all peers,
or once for several hundred MiB. Receivers wait for all their senders anyway. In return a peer that is late to make room
holds up the rows of the peers beside it. It does that only when it is a whole round of the receive buffer behind, and
then those peers soon wait for its own rows.
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
    """The choice between ways to write rows. It changes speed only, may differ between ranks and may change between
    exchanges.

    Attributes:
        push_below_bytes: what one rank sends to another is written by a kernel if it is smaller in all,
        push_below_bytes_per_range: or on average over its ranges of rows; else by copy engine.
        push_blocks: blocks of the kernel, at most.
        signal_after_bytes: copies to following peers are made, and signalled, together up to about this much.
        keep_from_bytes: rows that stay on a rank are copied by engine if they are at least as large in all,
        keep_from_bytes_per_range: and on average over their ranges; else by a kernel on the computation's stream.
    """

    # Up to about 16 MiB to a peer a kernel is as fast as the engines, which need time to start
    # (benchmarks/results/transport_ways.json), but it takes multiprocessors from the computation beside it.
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
        events: that come when they are done.
        held: their tensors, which live until they were waited for.
        peers: who had to make room first,
        reuses: by consuming this exchange; 0 for none.
    """

    events: list[Event]
    held: tuple[torch.Tensor, ...]
    peers: tuple[int, ...]
    reuses: int

    def wait(self) -> None:
        """Let the current stream wait for them."""
        for event in self.events:
            event.wait(torch.cuda.current_stream())


class Streams(Protocol):
    """Streams, and the kernel that gathers rows on them; :mod:`distca.transport.cuda_ops` on GPUs."""

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
    """And copy engines, and signals to peers whose memory is mapped."""

    def copy_rows(self, pieces: Sequence[tuple[int, int, np.ndarray, int]], batched: bool, stream: Any) -> None: ...
    def signal(self, addresses: np.ndarray, value: int, stream: Any) -> None: ...
    def wait_for(self, addresses: np.ndarray, value: int, stream: Any) -> None: ...


@dataclass(frozen=True)
class Addresses:
    """The addresses that a rank reads and writes. Array legend: R ranks; an entry of a rank's own is not used.

    Attributes:
        receive_buffers: [R] first byte of each rank's receive buffer.
        consumed_here: [R] uint64, own words: up to which exchange each rank has consumed what this rank wrote.
        arrived_there: [R] uint64, each rank's slot: the newest exchange that arrived from this rank.
    """

    receive_buffers: Sequence[int]
    consumed_here: np.ndarray
    arrived_there: np.ndarray


class IntranodePeers:
    """The queue of one rank's work for its intra-node peers, and of copies of rows that it keeps.

    Args:
        addresses: where.
        device: of the rows.
        queue: the streams.

    Attributes:
        policy: how rows are copied.
    """

    def __init__(self, addresses: Addresses, device: torch.device | str, queue: Queue = cuda_ops) -> None:
        self.policy = CopyPolicy()
        self._at, self._queue = addresses, queue
        self._streams: dict[str, Any] = {}
        self._finished_blocks = torch.zeros(1, dtype=torch.int32, device=device)
        # By peer: the newest exchange that it is known to have consumed where its next write is queued; the stream of
        # its last write, and when that one is done.
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
        """See :meth:`distca.transport.nvshmem.interface.Fabric.keep`. By engine where ranges are few and long, else by
        a kernel on the current stream."""
        by_engine = []
        for part in parts:
            if self._is_long(part):
                by_engine.append(part)
            else:
                part.moves.copy_kept(part.source, part.destination)
        return self._keep(by_engine, behind) if by_engine else None

    def _keep(self, parts: Sequence[Part], behind: Sent | None) -> Sent:
        """Queues copies by engine, after the writes to peers: others wait for those."""
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
        """Peers that are copied to and signalled together."""
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
        # The stream waits for room, not the kernel, whose blocks would spin on multiprocessors.
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
        """Let a stream wait for the rows, for the peers' room, and for earlier writes to them that took another way:
        the slot of arrivals only tells the newest exchange, so they must arrive in order."""
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
        """Writes to peers go before anything else that is ready."""
        if name not in self._streams:
            self._streams[name] = self._queue.create_stream(priority)
        return self._streams[name]
