"""Rows and signals between a rank and its inter-node peers: those whose memory it cannot map, on other nodes.

NVSHMEM's puts travel by the network, which reads from symmetric memory only and finishes puts in any order. So rows are
first packed into *staging* memory, a *load* at a time. All steps of an exchange are on one stream of its own:

    wait until the peers have room · for each load of rows: pack it · quiet, but for the first · put it ·
    at last quiet · signal all peers

*Quiet* waits until everything that was put and signalled before it has arrived. The last quiet orders signals behind
all rows of the exchange, and behind the signals of the exchange before. The staging memory has two halves, which loads
use in turn. The quiet before a load's puts waits for the load before, whose half the next load is packed into. So a
load is packed while the one before travels. Several pieces share a load, so that small ones for many peers travel
together.

No other stream may call quiet: NVSHMEM keeps one list of puts under way per process, and a quiet on another stream
would empty it without making this stream wait.
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
"""Bytes that places in a load are multiples of, so that kernels may write 16 bytes at a time."""
_MOST_STAGING, _LEAST_STAGING = 64 << 20, 2 << 20
"""The most and the least bytes of staging memory, which is otherwise a quarter of the receive buffer. A larger exchange
takes several loads. They were not measured on a network."""
_PACK_BLOCKS = 32
"""Most blocks of the kernel that packs. It has few, so that it leaves multiprocessors to the computation; the network
is slower than it is. This was not measured."""
_NOBODY = np.empty(0, np.uint64)


def staging_bytes(capacity: int) -> int:
    """Bytes of staging memory for a receive buffer of ``capacity`` bytes: two equal halves of whole places."""
    return min(_MOST_STAGING, max(_LEAST_STAGING, capacity // 4)) // (2 * _ALIGNMENT) * (2 * _ALIGNMENT)


class InternodeQueue(Streams, Protocol):
    """Streams with NVSHMEM's calls; :class:`distca.transport.nvshmem.internode.NvshmemQueue` on GPUs.

    A place in a peer's memory is named by the address that it has in this rank's own symmetric memory.
    """

    def put(self, to: int, source: int, size: int, peer: int, stream: Any) -> None:
        """Starts copying ``size`` bytes of symmetric memory from ``source`` to ``to`` on the peer."""
        ...

    def quiet(self, stream: Any) -> None:
        """Holds the stream until all puts and signals before it are done and peers can see them."""
        ...

    def set_signal(self, slot: int, number: int, peer: int, stream: Any) -> None:
        """Starts writing a number to a slot of the peer; two such writes need a quiet between them to keep their
        order."""
        ...

    def add_to_signal(self, slot: int, by: int, peer: int, stream: Any) -> None:
        """Starts adding to a slot of the peer, behind earlier work of the stream; additions may arrive in any order."""
        ...

    def wait_for_signal(self, slot: int, number: int, stream: Any) -> None:
        """Holds the stream until a slot of this rank is at least the number; everything that was quiet before that
        write can be seen then."""
        ...


@dataclass(frozen=True)
class InternodeAddresses:
    """The addresses that a rank reads and writes in its own symmetric memory.

    Attributes:
        receive_buffer: first byte of the receive buffer.
        staging: first byte of the staging memory, a multiple of 256.
        staging_bytes: its size, a multiple of 512.
        arrived_there: slot in which a peer sees the newest exchange that arrived from this rank.
        consumed_here: first of [ranks] slots: up to which exchange each rank has consumed this rank's rows.
        consumed_there: slot in which a peer sees up to which exchange this rank has consumed the peer's rows.
        arrived_here: first of [ranks] slots: the newest exchange that arrived from each rank.
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
        peer: the rank that gets the rows.
        source: tensor whose rows are sent.
        rows: [N] int64 on the device: the rows of it.
        staged: byte of the load at which they are packed.
        lands: byte of the peer's receive buffer at which they arrive.
        size: bytes of all these rows.
    """

    peer: int
    source: torch.Tensor
    rows: torch.Tensor
    staged: int
    lands: int
    size: int


def cut_into_loads(puts: dict[int, list[Put]], capacity: int) -> Iterator[list[Slice]]:
    """Deals pieces over loads of at most ``capacity`` bytes, a multiple of 256; large pieces are cut between rows."""
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
        addresses: the addresses in this rank's symmetric memory.
        device: device of the rows.
        queue: streams and NVSHMEM's calls.
    """

    def __init__(self, addresses: InternodeAddresses, device: torch.device | str, queue: InternodeQueue) -> None:
        self._at, self._queue = addresses, queue
        self._half = addresses.staging_bytes // 2
        self._stream = queue.create_stream(-1)
        self._finished_blocks = torch.zeros(1, dtype=torch.int32, device=device)
        # By peer, numbers of exchanges: the newest one that this stream has waited for the peer to consume; and the
        # newest one that the peer was told that this rank has consumed.
        self._room: dict[int, int] = {}
        self._told: dict[int, int] = {}

    def put(self, number: int, reuses: int, puts: dict[int, list[Put]]) -> tuple[Sent, Any]:
        """See :meth:`distca.transport.nvshmem.interface.Fabric.put`.

        Returns:
            A token for when the sources may be written again, which is once they are packed; and an event that comes
            when the rows have arrived and the signals are under way.
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
        """On the current stream: see :meth:`distca.transport.nvshmem.interface.Fabric.consumed`.

        Slots are added to and not set, so that two signals without a quiet between them leave the right number in
        either order."""
        for peer in peers:
            by = number - self._told.get(peer, 0)
            if by:
                self._queue.add_to_signal(self._at.consumed_there, by, peer, self._queue.current_stream())
                self._told[peer] = number

    def finish(self, patience_s: float = 5.0) -> None:
        """Makes the host wait until all rows and signals have arrived, at most ``patience_s`` seconds, as a peer may be
        gone. It must be called before the process ends, since the computation does not wait for packed rows."""
        queue, stream = self._queue, self._stream
        stream.wait_event(queue.mark(queue.current_stream()))
        queue.quiet(stream)
        done, end = queue.mark(stream), time.monotonic() + patience_s
        while not done.query() and time.monotonic() < end:
            time.sleep(0.01)

    def _pack(self, load: list[Slice], staging: int) -> Any:
        """Packs a load; returns an event that comes once it is packed."""
        pieces = [(each.source, each.rows, staging + each.staged) for each in load]
        self._queue.push_rows(pieces, _NOBODY, 0, self._finished_blocks, _PACK_BLOCKS, self._stream)
        return self._queue.mark(self._stream)

    def _put(self, load: list[Slice], staging: int) -> None:
        """Starts copying a packed load to its peers."""
        for each in load:
            self._queue.put(
                self._at.receive_buffer + each.lands, staging + each.staged, each.size, each.peer, self._stream
            )


class NvshmemQueue:
    """The :class:`distca.transport.nvshmem.internode.InternodeQueue` on GPUs; NVSHMEM must have started."""

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
        # The driver's plain wait, which intra-node peers use, does not promise that writes of a network card before the
        # slot can be seen.
        self._calls.signal_wait_until_on_stream(slot, self._at_least, number, stream.cuda_stream)


@dataclass(frozen=True)
class SentInternode(Sent):
    """Writes of which some go to inter-node peers. The sources may be written again once ``events`` came, which is
    before those writes are done.

    Attributes:
        intranode: the writes to intra-node peers.
        written: event that comes when the writes to inter-node peers are done.
    """

    intranode: Sent
    written: Any

    def wait(self) -> None:
        """Makes the current stream wait for all writes, also for those to inter-node peers."""
        super().wait()
        torch.cuda.current_stream().wait_event(self.written)


class Peers:
    """Splits a rank's writes into those to intra-node peers and those to inter-node peers.

    Args:
        intranode: writes to peers whose memory this rank maps.
        internode: writes to the other peers; None where there are none.
        internode_peers: the ranks of these.
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
        # Writes between nodes are queued first, as they take longest.
        packed, written = self._internode.put(number, reuses, internode)
        intranode = self._intranode.put(number, reuses, {peer: puts[peer] for peer in puts if peer not in internode})
        return SentInternode(
            packed.events + intranode.events, packed.held + intranode.held, tuple(puts), reuses, intranode, written
        )

    def keep(self, parts: Sequence[Part], behind: Sent | None) -> Sent | None:
        """See :meth:`distca.transport.nvshmem.interface.Fabric.keep`.

        Kept rows wait only for copies to intra-node peers, which share the copy engines with them."""
        return self._intranode.keep(parts, behind.intranode if isinstance(behind, SentInternode) else behind)
