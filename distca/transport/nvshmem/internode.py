"""NVSHMEM's writes of rows and signals to *inter-node peers*: ranks on other nodes, whose memory this rank cannot map.

:class:`Peers`, at the end of the file, splits a rank's writes between this file and ``intranode.py``, for peers on the
same node. NVSHMEM's memory is *symmetric*: each rank has a block of the same layout, with a receive buffer.

An *exchange* of rows between all ranks has a number. Peers signal by this number that its rows have arrived, or that
they have *consumed* the exchange: copied the rows out of their receive buffer. A peer has *room* once it has consumed
the rows that lay where new ones will be written.

An NVSHMEM *put* copies memory over the network. Its source must be symmetric memory, and puts may finish in any order.
So rows are first packed into a part of the block, the *staging* memory. Rows that do not fit at once go in several
*loads*. *Quiet* is NVSHMEM's wait until all earlier puts and signals have arrived. All steps of an exchange are queued
on one side stream:

    wait until the peers have room
    for each load: pack it · quiet, except for the first load · put it
    quiet · signal to all peers that the exchange arrived

The staging memory has two halves, and loads use them in turn. While load n travels, load n + 1 is packed into the other
half. The quiet before the puts of load n + 1 waits for load n, so load n + 2 may then be packed into its half. The last
quiet makes signals arrive after all rows of the exchange, and after the signals of the exchange before. Rows for
several peers share a load, so that small pieces travel together.

No other stream may call quiet. NVSHMEM has one list of pending puts per process, and a quiet on another stream would
empty it without making this stream wait.
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
"""Bytes; each piece begins at a multiple of it in the staging memory, so that kernels may write 16 bytes at a time."""
_MOST_STAGING, _LEAST_STAGING = 64 << 20, 2 << 20
"""The largest and the smallest staging memory, in bytes; between them it is a quarter of the receive buffer. More rows
than a half holds take several loads, and a row must fit into a half. Both were chosen without a measurement."""
_PACK_BLOCKS = 32
"""The largest number of thread blocks of the packing kernel. Few blocks leave multiprocessors to compute, and should
still pack faster than a network sends. This was not measured."""
_NOBODY = np.empty(0, np.uint64)
"""No signals: the packing kernel tells no peer."""


def staging_bytes(capacity: int) -> int:
    """Bytes of staging memory beside a receive buffer of ``capacity`` bytes; each half is a multiple of 256."""
    return min(_MOST_STAGING, max(_LEAST_STAGING, capacity // 4)) // (2 * _ALIGNMENT) * (2 * _ALIGNMENT)


class InternodeQueue(Streams, Protocol):
    """Streams and NVSHMEM's calls; on GPUs :class:`distca.transport.nvshmem.internode.NvshmemQueue`.

    NVSHMEM names a place in a peer's block by the address of the same place in this rank's own block. A *slot* is a
    64-bit word that holds a signal.
    """

    def put(self, to: int, source: int, size: int, peer: int, stream: Any) -> None:
        """Starts copying ``size`` bytes from ``source``, in this rank's block, to ``to`` in the peer's block."""
        ...

    def quiet(self, stream: Any) -> None:
        """Makes the stream wait until all earlier puts and signals have arrived, and peers can see them."""
        ...

    def set_signal(self, slot: int, number: int, peer: int, stream: Any) -> None:
        """Starts writing a number to a slot of the peer. Two writes to one slot need a quiet between them, or the older
        one may arrive last."""
        ...

    def add_to_signal(self, slot: int, by: int, peer: int, stream: Any) -> None:
        """Starts adding ``by`` to a slot of the peer, behind earlier work of the stream."""
        ...

    def wait_for_signal(self, slot: int, number: int, stream: Any) -> None:
        """Makes the stream wait until a slot of this rank is at least ``number``.

        Rows that the peer put before a quiet and this signal can then be read."""
        ...


@dataclass(frozen=True)
class InternodeAddresses:
    """Addresses in this rank's block; NVSHMEM names places in peers' blocks by them, too.

    A peer's block has one slot for each rank that writes to it. This rank's slots in peers' blocks are
    ``arrived_there`` and ``consumed_there``. Rank r's slots in this block are number r of ``arrived_here`` and of
    ``consumed_here``.

    Attributes:
        receive_buffer: first byte of the receive buffer.
        staging: first byte of the staging memory, a multiple of 256.
        staging_bytes: size of the staging memory, a multiple of 512.
        arrived_there: slot to which this rank writes the newest exchange whose rows it has put to the peer.
        consumed_here: first of [ranks] slots, to which each rank writes the newest exchange that it has consumed.
        consumed_there: slot to which this rank writes the newest exchange that it has consumed.
        arrived_here: first of [ranks] slots, to which each rank writes the newest exchange whose rows it has put here.
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
    """Rows of one tensor that travel to one peer in one put.

    Attributes:
        peer: the rank that gets the rows.
        source: tensor whose rows are sent.
        rows: [N] int64 on the device, the numbers of the rows in ``source``.
        staged: byte of the load from which on the rows are packed.
        lands: byte of the peer's receive buffer from which on they arrive.
        size: bytes of all these rows.
    """

    peer: int
    source: torch.Tensor
    rows: torch.Tensor
    staged: int
    lands: int
    size: int


def cut_into_loads(puts: dict[int, list[Put]], capacity: int) -> Iterator[list[Slice]]:
    """Yields loads of at most ``capacity`` bytes, a multiple of 256, that together have all rows of ``puts``.

    Rows of a put that do not fit into the rest of a load go into the next load. Example: loads have room for 4 rows,
    and the puts have 3 and 2 rows. The first load then has 3 + 1 rows, and the second has 1."""
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
    """One rank's writes to its inter-node peers.

    Args:
        addresses: addresses in this rank's block.
        device: device of the rows.
        queue: streams and NVSHMEM's calls.
    """

    def __init__(self, addresses: InternodeAddresses, device: torch.device | str, queue: InternodeQueue) -> None:
        self._at, self._queue = addresses, queue
        self._half = addresses.staging_bytes // 2
        self._stream = queue.create_stream(-1)
        self._finished_blocks = torch.zeros(1, dtype=torch.int32, device=device)
        self._room: dict[int, int] = {}  # by peer, the newest exchange for whose consumption the stream has waited
        self._told: dict[int, int] = {}  # by peer, the newest exchange that this rank has told it to have consumed

    def put(self, number: int, reuses: int, puts: dict[int, list[Put]]) -> tuple[Sent, Any]:
        """Does what :meth:`distca.transport.nvshmem.interface.Fabric.put` says.

        Returns:
            A token with an event that comes when all rows are packed, so that the sources may be written again; and an
            event that comes when all rows have arrived and the signals have been started.
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
        """Does what :meth:`distca.transport.nvshmem.interface.Fabric.arrived` says."""
        for peer in peers:
            self._queue.wait_for_signal(self._at.arrived_here + 8 * peer, number, self._queue.current_stream())

    def consumed(self, number: int, peers: Sequence[int]) -> None:
        """Does what :meth:`distca.transport.nvshmem.interface.Fabric.consumed` says.

        There is no quiet between two such signals, so they may arrive in either order. That is why they add to the slot
        and do not set it."""
        for peer in peers:
            by = number - self._told.get(peer, 0)
            if by:
                self._queue.add_to_signal(self._at.consumed_there, by, peer, self._queue.current_stream())
                self._told[peer] = number

    def finish(self, patience_s: float = 5.0) -> None:
        """Makes the host wait until all rows and signals have arrived, for at most ``patience_s`` seconds.

        It must be called before the process ends: nothing else waits for the puts of packed rows. The wait is limited
        because a peer may be gone."""
        queue, stream = self._queue, self._stream
        stream.wait_event(queue.mark(queue.current_stream()))
        queue.quiet(stream)
        done, end = queue.mark(stream), time.monotonic() + patience_s
        while not done.query() and time.monotonic() < end:
            time.sleep(0.01)

    def _pack(self, load: list[Slice], staging: int) -> Any:
        """Packs a load into a half of the staging memory; returns an event that comes once it is packed."""
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
    """Implements :class:`distca.transport.nvshmem.internode.InternodeQueue` by NVSHMEM, which must have started."""

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
        # Intra-node peers use the driver's plain wait. It does not guarantee that rows which a network card wrote
        # before the slot can be read.
        self._calls.signal_wait_until_on_stream(slot, self._at_least, number, stream.cuda_stream)


@dataclass(frozen=True)
class SentInternode(Sent):
    """Writes of one exchange to peers on this node and on others.

    Rows for inter-node peers are packed copies. So ``events`` come when the sources may be written again, which is
    before those rows have arrived.

    Attributes:
        intranode: the writes to intra-node peers.
        written: event that comes when the rows for inter-node peers have arrived.
    """

    intranode: Sent
    written: Any

    def wait(self) -> None:
        """Makes the current stream wait until the rows have arrived at all peers."""
        super().wait()
        torch.cuda.current_stream().wait_event(self.written)


class Peers:
    """Splits a rank's writes between intra-node peers and inter-node peers.

    Args:
        intranode: writes to peers whose memory this rank can map.
        internode: writes to the other peers; None without other peers.
        internode_peers: the ranks of the other peers.
    """

    def __init__(
        self, intranode: IntranodePeers, internode: InternodePeers | None, internode_peers: Collection[int]
    ) -> None:
        self._intranode, self._internode, self._internode_peers = intranode, internode, frozenset(internode_peers)

    def put(self, number: int, reuses: int, puts: dict[int, list[Put]]) -> Sent:
        """Does what :meth:`distca.transport.nvshmem.interface.Fabric.put` says."""
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
        """Does what :meth:`distca.transport.nvshmem.interface.Fabric.keep` says.

        Kept rows wait for the copies to intra-node peers only, because both use the copy engines."""
        return self._intranode.keep(parts, behind.intranode if isinstance(behind, SentInternode) else behind)
