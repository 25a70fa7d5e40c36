"""NVSHMEM's memory and signals for the NVSHMEM transport (transport.py).

- block: the NVSHMEM memory of one rank. All ranks' blocks have the same layout.
- intra-node peers: the other ranks of this node. This rank writes to their blocks by copies or a kernel (intranode.py).
- inter-node peers: ranks on other nodes. This rank writes to their blocks by NVSHMEM's own calls (internode.py).
- hop: one movement of tensor rows between all ranks. Hops are numbered 1, 2, 3 and so on.
- exchange: one hop, or two if ranks send rows on to others.
- slot: a 64-bit word in a block. To signal, a rank writes a hop's number to a slot of a peer.

A block has, in this order:

1. [ranks] slots: slot r has the number of the newest hop whose rows from rank r have arrived
2. [ranks] slots: slot r has the largest n for which rank r has *consumed* (copied out of its buffer) all exchanges up
   to hop n
3. the receive buffer, into which peers write rows
4. if any rank has inter-node peers: staging memory, in which rows are packed before they travel
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from distca.cluster.health import watch_waits
from distca.cluster.process import machine_name
from distca.cluster.waits import Wait
from distca.errors import TransportError
from distca.transport import cuda_ops
from distca.transport.interface import Part
from distca.transport.nvshmem.interface import Put
from distca.transport.nvshmem.internode import (
    InternodeAddresses,
    InternodePeers,
    NvshmemQueue,
    Peers,
    staging_bytes,
    why_not_row,
)
from distca.transport.nvshmem.intranode import Addresses, IntranodePeers, Sent

_PAGE = 4096
"""The receive buffer and the staging memory begin at multiples of this number of bytes."""


class NvshmemFabric:
    """Implements ``Fabric``; interface.py explains the methods.

    All ranks make the object together, and a process makes at most one.

    Args:
        group: process group of all ranks that exchange rows.
        capacity: bytes of each receive buffer.
        internode: ranks of this node to treat as inter-node peers, for tests.

    Raises:
        TransportError: NVSHMEM does not start, or the block of a rank on this node cannot be mapped.
    """

    def __init__(self, group: dist.ProcessGroup, capacity: int, internode: Collection[int] = ()) -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        mine = (machine_name(), bool(internode))
        everyone = [mine] * self.ranks
        dist.all_gather_object(everyone, mine, group=group)
        nodes = [node for node, _ in everyone]
        one_node = len(set(nodes)) == 1
        has_internode = not one_node or any(asked for _, asked in everyone)
        self._layout = layout = _Layout.of(self.ranks, capacity, staging_bytes(capacity) if has_internode else 0)
        _initialize(group, layout.bytes, one_node)
        self._memory = _symmetric_memory(group, layout)
        self.receive_buffer = self._memory[layout.receive_buffer : layout.receive_buffer + capacity]
        self._signals = self._memory[: 2 * self.ranks * 8].view(torch.int64)
        # On this stream a watching thread copies slots to the host, without waiting for other work.
        self._looking = cuda_ops.create_stream(0)
        self._beside: torch.cuda.Stream | None = None
        self._seen = torch.empty(2 * self.ranks, dtype=torch.int64, pin_memory=True)
        self._waits = watch_waits(group, self._missing)
        bases = _addresses_of_blocks(self._memory, nodes, group)
        self._internode = frozenset(internode) | {peer for peer, address in enumerate(bases) if not address}
        # The addresses of all slots of list 1 in this rank's block. Peers signal there that their rows have arrived.
        self._arrived_here = cuda_ops.addresses_of(bases[self.rank], range(self.ranks))
        # The address of this rank's slot of list 2 in the block of each intra-node peer.
        intranode = [bases[peer] for peer in range(self.ranks) if peer != self.rank and peer not in self._internode]
        self._consumed_there = np.array([address + layout.consumed(self.rank) for address in intranode], np.uint64)
        self.intranode = IntranodePeers(layout.addresses(bases, self.rank), self.receive_buffer.device)
        self._internode_peers = None
        if self._internode:
            own = layout.internode_addresses(bases[self.rank], self.rank)
            self._internode_peers = InternodePeers(own, self.receive_buffer.device, NvshmemQueue())
            atexit.register(self._internode_peers.finish)
        self._peers = Peers(self.intranode, self._internode_peers, self._internode)

    def why_not_row(self, row_bytes: int) -> str | None:
        return why_not_row(row_bytes, len(self.receive_buffer)) if self._layout.staging_bytes else None

    def put(self, number: int, reuses: int, puts: dict[int, list[Put]]) -> Sent:
        return self._peers.put(number, reuses, puts)

    def keep(self, parts: Sequence[Part], behind: Sent | None) -> Sent | None:
        return self._peers.keep(parts, behind)

    def join(self, token: Sent) -> None:
        # ``token.wait()`` is not used: it would also wait until rows have arrived on other nodes.
        for event in token.events:
            event.wait(torch.cuda.current_stream())
        if token.peers and token.reuses:
            self._watch(token.peers, token.reuses, "room that is held by")

    def arrived(self, number: int, peers: Sequence[int]) -> None:
        if not peers:
            return
        intranode = [peer for peer in peers if peer not in self._internode]
        if intranode:
            cuda_ops.wait_for(self._arrived_here[intranode], number, torch.cuda.current_stream())
        if self._internode_peers is not None:
            self._internode_peers.arrived(number, [peer for peer in peers if peer in self._internode])
        self._watch(peers, number, "rows of")

    def beside(self, work: Callable[[], None]) -> Sent:
        if self._beside is None:
            self._beside = cuda_ops.create_stream(-1)
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            work()
        return Sent([cuda_ops.mark(self._beside)], (), (), 0)

    def compute(self, work: Callable[[], None]) -> None:
        work()

    def consumed(self, number: int) -> None:
        if len(self._consumed_there):
            cuda_ops.signal(self._consumed_there, number, torch.cuda.current_stream())
        if self._internode_peers is not None:
            self._internode_peers.consumed(number, sorted(self._internode))

    def _watch(self, peers: Sequence[int], number: int, what: str) -> None:
        # ``what`` is a part of messages. :meth:`_missing` looks at list 1 of slots for "rows of", else at list 2.
        self._waits.note(Wait(cuda_ops.mark(torch.cuda.current_stream()), tuple(peers), number, what))

    def _missing(self, wait: Wait) -> list[int]:
        """Returns the peers whose signals have not come yet. A watching thread calls this method."""
        with torch.cuda.device(self.receive_buffer.device), torch.cuda.stream(self._looking):
            self._seen.copy_(self._signals, non_blocking=True)
            self._looking.synchronize()
        slots = self._seen.tolist()
        first = 0 if wait.what == "rows of" else self.ranks
        return [peer for peer in wait.peers if slots[first + peer] < wait.number]


@dataclass(frozen=True)
class _Layout:
    """The layout of a block: offsets and sizes in bytes."""

    ranks: int
    receive_buffer: int
    staging: int
    staging_bytes: int
    bytes: int

    @staticmethod
    def of(ranks: int, capacity: int, staging_bytes: int) -> _Layout:
        receive_buffer = _whole_pages(2 * ranks * 8)
        staging = receive_buffer + _whole_pages(capacity)
        return _Layout(ranks, receive_buffer, staging, staging_bytes, staging + staging_bytes)

    def arrived(self, rank: int) -> int:
        return 8 * rank

    def consumed(self, rank: int) -> int:
        return 8 * (self.ranks + rank)

    def addresses(self, bases: Sequence[int], rank: int) -> Addresses:
        """Returns the addresses for writes to intra-node peers; rank r's block begins at bases[r]."""
        return Addresses(
            receive_buffers=[base + self.receive_buffer for base in bases],
            consumed_here=cuda_ops.addresses_of(bases[rank], range(self.ranks, 2 * self.ranks)),
            arrived_there=np.array([base + self.arrived(rank) for base in bases], np.uint64),
        )

    def internode_addresses(self, base: int, rank: int) -> InternodeAddresses:
        """Returns the addresses for writes to inter-node peers; this rank's block begins at ``base``.

        To name a place in a peer's block, NVSHMEM takes the address of the same place in this rank's block."""
        return InternodeAddresses(
            receive_buffer=base + self.receive_buffer,
            staging=base + self.staging,
            staging_bytes=self.staging_bytes,
            arrived_here=base + self.arrived(0),
            arrived_there=base + self.arrived(rank),
            consumed_here=base + self.consumed(0),
            consumed_there=base + self.consumed(rank),
        )


def _whole_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _symmetric_memory(group: dist.ProcessGroup, layout: _Layout) -> torch.Tensor:
    """Returns this rank's block, [layout.bytes] uint8, after all ranks have set their slots to 0."""
    import nvshmem.core

    memory: torch.Tensor = nvshmem.core.bytetensor((layout.bytes,), release=True, except_on_del=False)
    memory[: layout.receive_buffer].zero_()
    torch.cuda.synchronize()
    dist.barrier(group)
    return memory


def _addresses_of_blocks(memory: torch.Tensor, nodes: Sequence[str], group: dist.ProcessGroup) -> list[int]:
    """Returns the address of each rank's block in this process; 0 for blocks on other nodes."""
    from nvshmem import bindings

    rank, names = dist.get_rank(group), dist.get_process_group_ranks(group)
    base = memory.data_ptr()
    bases = [base if peer == rank else int(bindings.ptr(base, peer)) for peer in range(len(nodes))]
    unreachable = [names[peer] for peer, address in enumerate(bases) if not address and nodes[peer] == nodes[rank]]
    if unreachable:
        raise TransportError(
            f"Rank {names[rank]} cannot map the memory of ranks {unreachable}: their GPUs have no peer access. "
            "Set `transport` to nccl."
        )
    return bases


def _initialize(group: dist.ProcessGroup, heap_bytes: int, one_node: bool) -> None:
    if not one_node and os.environ.get("NVSHMEM_REMOTE_TRANSPORT", "").lower() == "none":
        raise TransportError(
            "NVSHMEM_REMOTE_TRANSPORT is 'none', but the server pool spans several nodes. Unset it, or set "
            "`transport` to nccl."
        )
    # 16 MiB beside the block are for NVSHMEM's own data.
    os.environ["NVSHMEM_SYMMETRIC_SIZE"] = str(heap_bytes + (16 << 20))
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")  # multicast memory is not used here
    if one_node:
        os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
    import nvshmem.core
    from cuda.core import Device

    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    uid, failed = None, None
    try:
        uid = nvshmem.core.get_unique_id(empty=rank != 0)
    except Exception as error:
        failed = str(error)
    # The first rank sends the id, or the text of an error.
    box: list[Any] = [failed if uid is None else uid._data.tobytes()]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    if uid is None:
        raise TransportError(str(failed))
    if isinstance(box[0], str):
        raise TransportError(
            f"rank {dist.get_global_rank(group, 0)} could not make the id with which NVSHMEM connects ranks: {box[0]}"
        )
    uid._data.view(np.uint8)[:] = np.frombuffer(box[0], np.uint8)
    device = Device(torch.cuda.current_device())
    device.set_current()
    try:
        nvshmem.core.init(device=device, uid=uid, rank=rank, nranks=ranks, initializer_method="uid")
    except Exception as error:
        network = "" if one_node else "; `distca doctor` says by which networks NVSHMEM can reach other nodes here"
        raise TransportError(f"{error}{network}") from error
