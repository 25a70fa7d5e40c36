"""Rows and signals between a rank and its inter-node peers: those whose memory it cannot map, on other nodes.

NVSHMEM's puts travel by the network, which reads from symmetric memory only and finishes in any order. So an exchange
goes, on one stream of its own,

    wait until the peers have room · for each load of rows: pack it · quiet, but for the first · put it ·
    at last quiet · signal all peers

*Quiet* waits until everything that was put and signalled before it is there. Before the signals it orders them behind
all pieces of the exchange, and behind the signals of the one before. Before the puts of a load it lets the load ahead
leave its half of the staging memory, into which the next one is packed: so packing one half hides behind the travel of
the other. Several pieces share a load, so that small ones for many peers travel together.

Quiet belongs to this stream alone: NVSHMEM keeps one list of puts under way per process, and a quiet on another stream
would empty it without letting this one wait.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from distca.transport import cuda_ops
from distca.transport.interface import Part
from distca.transport.nvshmem.interface import Put
from distca.transport.nvshmem.intranode import IntranodePeers, Sent, Streams

_ALIGNMENT = 256
_MOST_STAGING = 64 << 20
_LEAST_STAGING = 2 << 20
# Blocks of the kernel that packs: few, because the network is slower than they are. Not measured.
_PACK_BLOCKS = 32
_NOBODY = np.empty(0, np.uint64)


def staging_bytes(capacity: int) -> int:
    """Bytes of staging memory beside so many bytes of receive buffer: two halves, each of which holds any row."""
    return min(_MOST_STAGING, max(_LEAST_STAGING, capacity // 4)) // (2 * _ALIGNMENT) * (2 * _ALIGNMENT)


class InternodeQueue(Streams, Protocol):
    """And NVSHMEM's calls on them; :class:`distca.transport.nvshmem.internode.NvshmemQueue` on GPUs.

    Places of a peer are named by the address that they have in this rank's own symmetric memory.
    """

    def put(self, to: int, source: int, size: int, peer: int, stream: Any) -> None:
        """Start copying ``size`` bytes of symmetric memory from ``source`` to ``to`` on the peer."""
        ...

    def quiet(self, stream: Any) -> None:
        """Hold the stream until all puts and signals before it are done and can be seen."""
        ...

    def set_signal(self, slot: int, number: int, peer: int, stream: Any) -> None:
        """Start writing a number to a slot of the peer. Two such writes are ordered by a quiet between them."""
        ...

    def add_to_signal(self, slot: int, by: int, peer: int, stream: Any) -> None:
        """Start adding to a slot of the peer, after earlier work of the stream. In any order they add up alike."""
        ...

    def wait_for_signal(self, slot: int, number: int, stream: Any) -> None:
        """Hold the stream until a slot of this rank is at least the number, and what was quiet before it was written
        can be seen."""
        ...


@dataclass(frozen=True)
class InternodeAddresses:
    """The addresses that a rank reads and writes in its own symmetric memory.

    Attributes:
        receive_buffer: first byte of the receive buffer.
        staging: first byte of the staging memory, a multiple of 256.
        staging_bytes: its size, a multiple of 512.
        arrived_there: slot in which a peer sees the newest exchange that arrived from this rank.
        consumed_here: first of the slots, one a rank: up to which exchange it has consumed what this rank wrote.
        consumed_there: slot in which a peer sees up to which exchange this rank has consumed what that peer wrote.
        arrived_here: first of the slots, one a rank: the newest exchange that arrived from it.
    """

    receive_buffer: int
    staging: int
    staging_bytes: int
    arrived_there: int
    consumed_here: int
    consumed_there: int
    arrived_here: int


@dataclass(frozen=True)
class Slice:
    """Rows of one piece that travel in one put.

    Attributes:
        peer: where to.
        source: tensor whose rows are sent.
        rows: [N] int64 on the device, which ones.
        staged: byte of the load at which they are packed.
        lands: byte of the peer's receive buffer.
        size: bytes.
    """

    peer: int
    source: torch.Tensor
    rows: torch.Tensor
    staged: int
    lands: int
    size: int


def cut_into_loads(puts: dict[int, list[Put]], capacity: int) -> Iterator[list[Slice]]:
    """Deal pieces over loads of at most ``capacity`` bytes, a multiple of 256; large pieces are cut between rows."""
    load: list[Slice] = []
    used = 0
    for peer, pieces in puts.items():
        for put in pieces:
            assert put.row_bytes <= capacity, "the staging memory holds any row"
            lands = put.begin + int(put.ranges[0, 1]) * put.row_bytes if put.bytes else 0
            first = 0
            while first * put.row_bytes < put.bytes:
                count = min((capacity - used) // put.row_bytes, len(put.rows) - first)
                if count == 0:
                    yield load
                    load, used = [], 0
                    continue
                rows, size = put.rows[first : first + count], count * put.row_bytes
                load.append(Slice(peer, put.source, rows, used, lands + first * put.row_bytes, size))
                used += -(-size // _ALIGNMENT) * _ALIGNMENT
                first += count
    if load:
        yield load


class InternodePeers:
    """The queue of one rank's work for its inter-node peers.

    Args:
        addresses: where.
        device: of the rows.
        queue: the streams.
    """

    def __init__(self, addresses: InternodeAddresses, device: torch.device | str, queue: InternodeQueue) -> None:
        self._at, self._queue = addresses, queue
        self._half = addresses.staging_bytes // 2
        self._stream = queue.create_stream(-1)
        self._finished_blocks = torch.zeros(1, dtype=torch.int32, device=device)
        # By peer: the newest exchange that it is known to have consumed where this stream is, and up to which exchange
        # it was told that this rank has consumed.
        self._room: dict[int, int] = {}
        self._told: dict[int, int] = {}

    def put(self, number: int, reuses: int, puts: dict[int, list[Put]]) -> tuple[Sent, Any]:
        """See :meth:`distca.transport.nvshmem.interface.Fabric.put`.

        Returns:
            What tells that the sources may be written again, which is once they are packed; and an event that comes
            when the rows are there and the signals are under way.
        """
        queue, stream = self._queue, self._stream
        stream.wait_event(queue.mark(queue.current_stream()))
        for peer in puts:
            if self._room.get(peer, 0) < reuses:
                queue.wait_for_signal(self._at.consumed_here + 8 * peer, reuses, stream)
                self._room[peer] = reuses
        packed = queue.mark(stream)
        for k, load in enumerate(cut_into_loads(puts, self._half)):
            staging = self._at.staging + k % 2 * self._half
            packed = self._pack(load, staging)
            if k:
                queue.quiet(stream)
            self._put(load, staging)
        queue.quiet(stream)
        for peer in puts:
            queue.set_signal(self._at.arrived_there, number, peer, stream)
        held = tuple(tensor for pieces in puts.values() for piece in pieces for tensor in (piece.source, piece.rows))
        return Sent([packed], held, tuple(puts), reuses), queue.mark(stream)

    def arrived(self, number: int, peers: Sequence[int]) -> None:
        """On the current stream: see :meth:`distca.transport.nvshmem.interface.Fabric.arrived`."""
        for peer in peers:
            self._queue.wait_for_signal(self._at.arrived_here + 8 * peer, number, self._queue.current_stream())

    def consumed(self, number: int, peers: Sequence[int]) -> None:
        """On the current stream: see :meth:`distca.transport.nvshmem.interface.Fabric.consumed`. Slots are added to,
        not set: two signals with no quiet between them leave the right number also if the later one is faster."""
        for peer in peers:
            by = number - self._told.get(peer, 0)
            if by:
                self._queue.add_to_signal(self._at.consumed_there, by, peer, self._queue.current_stream())
                self._told[peer] = number

    def finish(self, patience_s: float = 5.0) -> None:
        """Let the host wait until all rows and signals are there, but not for long: a peer may be gone. To be called
        before the process ends, as the computation does not wait for rows that are packed."""
        queue, stream = self._queue, self._stream
        stream.wait_event(queue.mark(queue.current_stream()))
        queue.quiet(stream)
        done, end = queue.mark(stream), time.monotonic() + patience_s
        while not done.query() and time.monotonic() < end:
            time.sleep(0.01)

    def _pack(self, load: list[Slice], staging: int) -> Any:
        """Pack a load; returns the event that it is packed."""
        pieces = [(each.source, each.rows, staging + each.staged) for each in load]
        self._queue.push_rows(pieces, _NOBODY, 0, self._finished_blocks, _PACK_BLOCKS, self._stream)
        return self._queue.mark(self._stream)

    def _put(self, load: list[Slice], staging: int) -> None:
        """Start copying a packed load."""
        for each in load:
            self._queue.put(
                self._at.receive_buffer + each.lands, staging + each.staged, each.size, each.peer, self._stream
            )


class NvshmemQueue:
    """:class:`distca.transport.nvshmem.internode.InternodeQueue` on GPUs; NVSHMEM runs already."""

    create_stream = staticmethod(cuda_ops.create_stream)
    current_stream = staticmethod(cuda_ops.current_stream)
    mark = staticmethod(cuda_ops.mark)
    push_rows = staticmethod(cuda_ops.push_rows)

    def __init__(self) -> None:
        from nvshmem import bindings

        self._calls = bindings
        self._set, self._add = int(bindings.Signal_op.SIGNAL_SET), int(bindings.Signal_op.SIGNAL_ADD)
        self._at_least = int(bindings.Cmp_type.CMP_GE)

    def put(self, to: int, source: int, size: int, peer: int, stream: torch.cuda.Stream) -> None:
        self._calls.putmem_nbi_on_stream(to, source, size, peer, stream.cuda_stream)

    def quiet(self, stream: torch.cuda.Stream) -> None:
        self._calls.quiet_on_stream(stream.cuda_stream)

    def set_signal(self, slot: int, number: int, peer: int, stream: torch.cuda.Stream) -> None:
        self._calls.signal_op_on_stream(slot, number, self._set, peer, stream.cuda_stream)

    def add_to_signal(self, slot: int, by: int, peer: int, stream: torch.cuda.Stream) -> None:
        self._calls.signal_op_on_stream(slot, by, self._add, peer, stream.cuda_stream)

    def wait_for_signal(self, slot: int, number: int, stream: torch.cuda.Stream) -> None:
        # Not the driver's plain wait, as for intra-node peers: it need not order what a network card wrote before
        # the slot.
        self._calls.signal_wait_until_on_stream(slot, self._at_least, number, stream.cuda_stream)


@dataclass(frozen=True)
class SentInternode(Sent):
    """Writes of which some go to inter-node peers. The sources may be written again once ``events`` came, before those
    writes are done.

    Attributes:
        intranode: those to intra-node peers.
        written: comes when those to inter-node peers are done.
    """

    intranode: Sent
    written: Any

    def wait(self) -> None:
        """Let the current stream wait for all of them, also for those to inter-node peers."""
        super().wait()
        torch.cuda.current_stream().wait_event(self.written)


class Peers:
    """Shares a rank's writes out to intra-node and inter-node peers.

    Args:
        intranode: writes to peers whose memory this rank maps.
        internode: writes to the others; None where there are none.
        internode_peers: who they are.
    """

    def __init__(
        self, intranode: IntranodePeers, internode: InternodePeers | None, internode_peers: Collection[int]
    ) -> None:
        self._intranode, self._internode, self._internode_peers = intranode, internode, frozenset(internode_peers)

    def put(self, number: int, reuses: int, puts: dict[int, list[Put]]) -> Sent:
        """See :meth:`distca.transport.nvshmem.interface.Fabric.put`."""
        internode = {peer: pieces for peer, pieces in puts.items() if peer in self._internode_peers}
        if self._internode is None or not internode:
            return self._intranode.put(number, reuses, puts)
        # First, as they take longest.
        packed, written = self._internode.put(number, reuses, internode)
        intranode = self._intranode.put(number, reuses, {peer: puts[peer] for peer in puts if peer not in internode})
        return SentInternode(
            packed.events + intranode.events, packed.held + intranode.held, tuple(puts), reuses, intranode, written
        )

    def keep(self, parts: Sequence[Part], behind: Sent | None) -> Sent | None:
        """See :meth:`distca.transport.nvshmem.interface.Fabric.keep`. Kept rows wait for copies to intra-node peers
        only, as those alone share the engines with them."""
        return self._intranode.keep(parts, behind.intranode if isinstance(behind, SentInternode) else behind)
