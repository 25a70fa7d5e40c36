"""Sends rows by NVSHMEM to *inter-node peers*: ranks on other nodes.

- block: the NVSHMEM memory of one rank, with a receive buffer. All ranks' blocks have the same layout.
- hop: one movement of rows between all ranks. Hops are numbered 1, 2, 3 and so on.
- arrived: the rows lie in the receiver's buffer. Then the sender signals the hop's number to the receiver.
- consumed: the receiver has copied the rows out of its buffer. Then the receiver signals the number to all peers.
- put: NVSHMEM's copy from this rank's block to a peer's block.
- quiet: NVSHMEM's wait until all earlier puts and signals have arrived.
- staging memory: a part of the block, in two halves. Rows are packed there before they are put.
- load: the rows that are packed into one half at a time. While load n travels, load n + 1 is packed to the other half.

One side stream runs these steps of a hop:

    wait until the peers have consumed the rows that new rows will overwrite
    for each load: pack the load · quiet, except for the first load · put the load
    quiet · signal to receivers

No other stream may call quiet. NVSHMEM has one list of pending puts per process. A quiet on another stream would empty
this list, and then the side stream would not wait.
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
"""In the staging memory, the rows of each put begin at a multiple of this many bytes. The packing kernel needs a
multiple of 16 to write 16 bytes at a time."""
_MOST_STAGING, _LEAST_STAGING = 64 << 20, 2 << 20
"""The staging memory has a quarter of the receive buffer's size, but within these limits in bytes. Both numbers were
chosen, not measured."""
_PACK_BLOCKS = 32
"""The most thread blocks of the packing kernel. More blocks would take multiprocessors from compute. The number was
chosen, not measured."""
_MIB, _GIB = 1 << 20, 1 << 30
_NO_SIGNALS = np.empty(0, np.uint64)


def staging_bytes(capacity: int) -> int:
    """Returns the size of the staging memory in bytes, a multiple of 512; ``capacity`` is the receive buffer's size."""
    return min(_MOST_STAGING, max(_LEAST_STAGING, capacity // 4)) // (2 * _ALIGNMENT) * (2 * _ALIGNMENT)


def why_not_row(row_bytes: int, capacity: int) -> str | None:
    """Returns why a row of ``row_bytes`` bytes cannot be packed in the staging memory; None if it can.

    ``capacity`` is the receive buffer's size in bytes."""
    limit = staging_bytes(capacity) // 2
    if row_bytes <= limit:
        return None
    larger = ""
    if 2 * row_bytes <= _MOST_STAGING:
        needed = 8 * (row_bytes + _ALIGNMENT)  # a quarter of it is staging memory, of which a half holds the row
        larger = f"`nvshmem_buffer_gb` to {needed / _GIB + 0.005:.2f} or more, or "
    return (
        f"`nvshmem_buffer_gb` gives {capacity / _GIB:.3g} GiB of symmetric memory per rank. Rows for other nodes then "
        f"have at most {limit / _MIB:.4g} MiB, but a row has {row_bytes / _MIB:.4g} MiB; set {larger}`transport` to "
        "nccl."
    )


class InternodeQueue(Streams, Protocol):
    """CUDA streams and NVSHMEM's calls.

    A *slot* is a 64-bit word of a block, for signals. To name a place in a peer's block, callers give the address of
    the same place in this rank's block.
    """

    def put(self, to: int, source: int, size: int, peer: int, stream: Any) -> None:
        """Starts copying ``size`` bytes from ``source`` in this rank's block to ``to`` in the peer's block."""
        ...

    def quiet(self, stream: Any) -> None: ...

    def set_signal(self, slot: int, number: int, peer: int, stream: Any) -> None: ...

    def add_to_signal(self, slot: int, by: int, peer: int, stream: Any) -> None:
        """Starts adding ``by`` to the slot in the peer's block."""
        ...

    def wait_for_signal(self, slot: int, number: int, stream: Any) -> None:
        """Makes the stream wait until the slot in this rank's block is at least ``number``."""
        ...


@dataclass(frozen=True)
class InternodeAddresses:
    """Addresses in this rank's block, which also name places in peers' blocks.

    Attributes:
        receive_buffer: first byte of the receive buffer.
        staging: first byte of the staging memory, a multiple of 256.
        staging_bytes: size of the staging memory, a multiple of 512.
        arrived_there, consumed_there: slots in the peer's block to which this rank signals.
        arrived_here, consumed_here: first slots of two arrays [ranks] in this rank's block; rank r signals to slot r.
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
    """The rows of one put: N rows of the tensor ``source``.

    Attributes:
        rows: [N] int64 row numbers, on the device.
        staged: offset of the packed rows in their half of the staging memory, in bytes.
        lands: offset of the rows in the peer's receive buffer, in bytes.
        size: bytes of the N rows.
    """

    peer: int
    source: torch.Tensor
    rows: torch.Tensor
    staged: int
    lands: int
    size: int


def cut_into_loads(puts: dict[int, list[Put]], capacity: int) -> Iterator[list[Slice]]:
    """Cuts the ``puts`` for all peers into loads, and yields the slices of each load.

    ``capacity`` is the most bytes that a load may have. It is a multiple of 256, and no row may be longer. Example: a
    load has room for 4 rows, and ``puts`` has 3 rows for rank 1 and 2 rows for rank 2. The first load has 3 rows for
    rank 1 and 1 row for rank 2. The second load has 1 row for rank 2."""
    load: list[Slice] = []
    used = 0
    for peer, pieces in puts.items():
        for put in pieces:
            assert put.row_bytes <= capacity, "OneSidedTransport refuses longer rows"
            # ranges[0, 1] is the number of rows that the peer gets from lower ranks; they lie before this rank's rows.
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
    def __init__(self, addresses: InternodeAddresses, device: torch.device | str, queue: InternodeQueue) -> None:
        self._at, self._queue = addresses, queue
        self._half = addresses.staging_bytes // 2
        self._stream = queue.create_stream(-1)
        self._finished_blocks = torch.zeros(1, dtype=torch.int32, device=device)
        self._room: dict[int, int] = {}  # by peer, the newest "consumed" signal that the side stream has waited for
        self._told: dict[int, int] = {}  # by peer, the newest "consumed" signal that this rank has sent

    def put(self, number: int, reuses: int, puts: dict[int, list[Put]]) -> tuple[Sent, Any]:
        """Queues the puts and signals of hop ``number``, after the current stream's earlier work.

        Puts to a peer wait until it has consumed all hops up to ``reuses``; with 0 no put waits.

        Returns:
            The puts, with the event that all rows are packed; and the event that all rows have arrived. After the first
            event, callers may write to the sources.
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
        for peer in peers:
            self._queue.wait_for_signal(self._at.arrived_here + 8 * peer, number, self._queue.current_stream())

    def consumed(self, number: int, peers: Sequence[int]) -> None:
        """Signals to ``peers`` that this rank has consumed all hops up to ``number``.

        Two signals without a quiet between them may arrive in any order. So a signal does not set the slot, but adds
        the number of newly consumed hops to it."""
        for peer in peers:
            by = number - self._told.get(peer, 0)
            if by:
                self._queue.add_to_signal(self._at.consumed_there, by, peer, self._queue.current_stream())
                self._told[peer] = number

    def finish(self, patience_s: float = 5.0) -> None:
        """Blocks the host until all rows and signals have arrived, for at most ``patience_s`` seconds.

        If the process ends without this call, its last rows may not arrive."""
        queue, stream = self._queue, self._stream
        stream.wait_event(queue.mark(queue.current_stream()))
        queue.quiet(stream)
        done, end = queue.mark(stream), time.monotonic() + patience_s
        while not done.query() and time.monotonic() < end:
            time.sleep(0.01)

    def _pack(self, load: list[Slice], staging: int) -> Any:
        pieces = [(each.source, each.rows, staging + each.staged) for each in load]
        self._queue.push_rows(pieces, _NO_SIGNALS, 0, self._finished_blocks, _PACK_BLOCKS, self._stream)
        return self._queue.mark(self._stream)

    def _put(self, load: list[Slice], staging: int) -> None:
        for each in load:
            self._queue.put(
                self._at.receive_buffer + each.lands, staging + each.staged, each.size, each.peer, self._stream
            )


class NvshmemQueue:
    """NVSHMEM must have started before this queue is used."""

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
        # A wait of the CUDA driver could end before rows from the network are readable.
        self._calls.signal_wait_until_on_stream(slot, self._at_least, number, stream.cuda_stream)


@dataclass(frozen=True)
class SentInternode(Sent):
    """A token for one hop's writes to inter-node peers and to *intra-node peers*, the other ranks of the node.

    Once ``events`` have happened, callers may write to the sources, but rows may still travel between nodes.

    Attributes:
        intranode: token of the writes to intra-node peers.
        written: event that the rows for inter-node peers have arrived.
    """

    intranode: Sent
    written: Any

    def wait(self) -> None:
        super().wait()
        torch.cuda.current_stream().wait_event(self.written)


class Peers:
    """Sends one rank's rows to peers on its node and on other nodes."""

    def __init__(
        self, intranode: IntranodePeers, internode: InternodePeers | None, internode_peers: Collection[int]
    ) -> None:
        self._intranode, self._internode, self._internode_peers = intranode, internode, frozenset(internode_peers)

    def put(self, number: int, reuses: int, puts: dict[int, list[Put]]) -> Sent:
        internode = {peer: pieces for peer, pieces in puts.items() if peer in self._internode_peers}
        if self._internode is None or not internode:
            return self._intranode.put(number, reuses, puts)
        packed, written = self._internode.put(number, reuses, internode)
        intranode = self._intranode.put(number, reuses, {peer: puts[peer] for peer in puts if peer not in internode})
        return SentInternode(
            packed.events + intranode.events, packed.held + intranode.held, tuple(puts), reuses, intranode, written
        )

    def keep(self, parts: Sequence[Part], behind: Sent | None) -> Sent | None:
        """Copies the rows of ``parts`` that stay here. Copy engines start after the intra-node writes of ``behind``."""
        return self._intranode.keep(parts, behind.intranode if isinstance(behind, SentInternode) else behind)
