"""NVSHMEM's writes of rows and signals to *inter-node peers*: ranks on other nodes, whose memory this rank cannot map.

NVSHMEM's memory is *symmetric*: each rank has a block of memory, and all blocks have the same layout. A block has,
among other things, a receive buffer. *Exchanges* of rows between all ranks are numbered. A sender signals an exchange's
number after the sender's rows have *arrived*. A receiver signals the number after it has *consumed* the rows: copied
them out of its receive buffer. A peer has *room* once it has consumed the rows that lie where new rows are to be
written.

An NVSHMEM *put* copies memory over the network, from symmetric memory. So rows are first packed into a part of the
block, the *staging* memory. Rows that do not fit travel in several *loads*. *Quiet* is NVSHMEM's wait until all earlier
puts and signals have arrived. All steps of an exchange are queued on one side stream:

    wait until the peers have room
    for each load: pack the load · quiet, except for the first load · put the load
    quiet · signal to all peers

The staging memory has two halves, and loads use the halves in turn. While load n travels, load n + 1 is packed into the
other half.

No other stream may call quiet. NVSHMEM has one list of pending puts per process, and a quiet on another stream would
empty the list without making this stream wait.
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
"""Each slice of rows begins at a multiple of this number of bytes in the staging memory. So kernels may write 16 bytes
at a time."""
_MOST_STAGING, _LEAST_STAGING = 64 << 20, 2 << 20
"""The largest and the smallest staging memory, in bytes. Between these limits the staging memory is a quarter of the
receive buffer. The limits were not measured."""
_PACK_BLOCKS = 32
"""The largest number of thread blocks of the packing kernel. The other multiprocessors go on computing. The number was
not measured."""
_NOBODY = np.empty(0, np.uint64)
"""The addresses that the packing kernel signals to: none."""


def staging_bytes(capacity: int) -> int:
    """Returns the bytes of staging memory for a receive buffer of ``capacity`` bytes, a multiple of 512."""
    return min(_MOST_STAGING, max(_LEAST_STAGING, capacity // 4)) // (2 * _ALIGNMENT) * (2 * _ALIGNMENT)


class InternodeQueue(Streams, Protocol):
    """Streams and NVSHMEM's calls. On GPUs it is a :class:`distca.transport.nvshmem.internode.NvshmemQueue`.

    NVSHMEM names a place in a peer's block by the address of the same place in the caller's own block. A *slot* is a
    64-bit word that holds a signal.
    """

    def put(self, to: int, source: int, size: int, peer: int, stream: Any) -> None:
        """Starts copying ``size`` bytes from ``source``, in this rank's block, to ``to`` in the peer's block."""
        ...

    def quiet(self, stream: Any) -> None:
        """Makes the stream wait until all earlier puts and signals have arrived."""
        ...

    def set_signal(self, slot: int, number: int, peer: int, stream: Any) -> None:
        """Starts writing a number to a slot of the peer. Without a quiet between two writes, the first may arrive
        last."""
        ...

    def add_to_signal(self, slot: int, by: int, peer: int, stream: Any) -> None:
        """Starts adding ``by`` to a slot of the peer, behind earlier work of the stream."""
        ...

    def wait_for_signal(self, slot: int, number: int, stream: Any) -> None:
        """Makes the stream wait until a slot of this rank is at least ``number``.

        If the peer called quiet between its puts and the signal, the rows can then be read."""
        ...


@dataclass(frozen=True)
class InternodeAddresses:
    """Addresses in this rank's block. With them NVSHMEM also names places in peers' blocks.

    Attributes:
        receive_buffer: first byte of the receive buffer.
        staging: first byte of the staging memory, a multiple of 256.
        staging_bytes: size of the staging memory, a multiple of 512.
        arrived_there: slot in a peer's block. This rank writes there the newest exchange whose rows it has put to the
            peer.
        consumed_here: first of [ranks] slots in this block. Rank r writes to slot r the number up to which it has
            consumed all exchanges.
        consumed_there: slot in a peer's block. This rank writes there the number up to which it has consumed all
            exchanges.
        arrived_here: first of [ranks] slots in this block. Rank r writes to slot r the newest exchange whose rows rank
            r has put to this rank.
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
        staged: first byte of the packed rows, counted from the begin of the load.
        lands: first byte of the rows in the peer's receive buffer.
        size: bytes of all these rows.
    """

    peer: int
    source: torch.Tensor
    rows: torch.Tensor
    staged: int
    lands: int
    size: int


def cut_into_loads(puts: dict[int, list[Put]], capacity: int) -> Iterator[list[Slice]]:
    """Cuts the rows of ``puts`` into loads of at most ``capacity`` bytes, and yields the slices of each load.

    Example: a load has room for 4 rows, and the puts have 3 and 2 rows. The first load then has 3 + 1 rows, and the
    second load has 1 row. ``capacity`` must be a multiple of 256."""
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
        self._room: dict[int, int] = {}  # by peer, the largest number of a "consumed" signal that was waited for
        self._told: dict[int, int] = {}  # by peer, the largest number of a "consumed" signal that was sent

    def put(self, number: int, reuses: int, puts: dict[int, list[Put]]) -> tuple[Sent, Any]:
        """Queues the puts and signals of an exchange, after the current stream's work so far.

        Args:
            number: number of the exchange.
            reuses: number of the exchange that a peer must have consumed before rows are put to the peer; 0 for no
                wait.
            puts: the rows to write, by peer.

        Returns:
            A token whose event comes when all rows are packed, so that the sources may be written again; and an event
            that comes when all rows have arrived.
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
        """Makes the current stream wait until the rows of exchange ``number`` from all ``peers`` have arrived."""
        for peer in peers:
            self._queue.wait_for_signal(self._at.arrived_here + 8 * peer, number, self._queue.current_stream())

    def consumed(self, number: int, peers: Sequence[int]) -> None:
        """Signals to ``peers`` that this rank has consumed all exchanges up to ``number``.

        Signals may arrive in any order, since there is no quiet between them. So a signal adds to the slot, and does
        not set the slot."""
        for peer in peers:
            by = number - self._told.get(peer, 0)
            if by:
                self._queue.add_to_signal(self._at.consumed_there, by, peer, self._queue.current_stream())
                self._told[peer] = number

    def finish(self, patience_s: float = 5.0) -> None:
        """Makes the host wait until all rows and signals have arrived, for at most ``patience_s`` seconds.

        It must be called before the process ends, or the last rows may not arrive."""
        queue, stream = self._queue, self._stream
        stream.wait_event(queue.mark(queue.current_stream()))
        queue.quiet(stream)
        done, end = queue.mark(stream), time.monotonic() + patience_s
        while not done.query() and time.monotonic() < end:
            time.sleep(0.01)

    def _pack(self, load: list[Slice], staging: int) -> Any:
        pieces = [(each.source, each.rows, staging + each.staged) for each in load]
        self._queue.push_rows(pieces, _NOBODY, 0, self._finished_blocks, _PACK_BLOCKS, self._stream)
        return self._queue.mark(self._stream)

    def _put(self, load: list[Slice], staging: int) -> None:
        for each in load:
            self._queue.put(
                self._at.receive_buffer + each.lands, staging + each.staged, each.size, each.peer, self._stream
            )


class NvshmemQueue:
    """Streams and NVSHMEM's calls; NVSHMEM must have started."""

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
        # The driver's own wait for a slot would not do: rows that a network card wrote before may not be readable yet.
        self._calls.signal_wait_until_on_stream(slot, self._at_least, number, stream.cuda_stream)


@dataclass(frozen=True)
class SentInternode(Sent):
    """Writes of one exchange to intra-node and inter-node peers.

    ``events`` come when the sources may be written again. Packed rows for inter-node peers may then still travel.

    Attributes:
        intranode: the writes to intra-node peers.
        written: event that comes when the rows for inter-node peers have arrived.
    """

    intranode: Sent
    written: Any

    def wait(self) -> None:
        """Makes the current stream wait until all rows have arrived."""
        super().wait()
        torch.cuda.current_stream().wait_event(self.written)


class Peers:
    """Splits a rank's writes between intra-node peers (on the rank's node) and inter-node peers.

    Args:
        intranode: writes to intra-node peers.
        internode: writes to inter-node peers; None if there are no inter-node peers.
        internode_peers: ranks of the inter-node peers.
    """

    def __init__(
        self, intranode: IntranodePeers, internode: InternodePeers | None, internode_peers: Collection[int]
    ) -> None:
        self._intranode, self._internode, self._internode_peers = intranode, internode, frozenset(internode_peers)

    def put(self, number: int, reuses: int, puts: dict[int, list[Put]]) -> Sent:
        """Queues the writes of exchange ``number`` and the signals.

        ``puts`` are the rows to write, by peer. Writes to a peer wait until the peer has consumed exchange ``reuses``.
        """
        internode = {peer: pieces for peer, pieces in puts.items() if peer in self._internode_peers}
        if self._internode is None or not internode:
            return self._intranode.put(number, reuses, puts)
        # Writes between nodes take longest, so they are queued first.
        packed, written = self._internode.put(number, reuses, internode)
        intranode = self._intranode.put(number, reuses, {peer: puts[peer] for peer in puts if peer not in internode})
        return SentInternode(
            packed.events + intranode.events, packed.held + intranode.held, tuple(puts), reuses, intranode, written
        )

    def keep(self, parts: Sequence[Part], behind: Sent | None) -> Sent | None:
        """Copies the rows of ``parts`` that stay on this rank, after the writes to intra-node peers in ``behind``."""
        return self._intranode.keep(parts, behind.intranode if isinstance(behind, SentInternode) else behind)
