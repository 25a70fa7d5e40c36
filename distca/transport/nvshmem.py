"""NVSHMEM inside one node: symmetric memory that peers map, copy engines that write into it, signals in memory.

NVSHMEM gives every rank a block of memory at a known place and the addresses under which its peers' blocks can be
reached over NVLink. Rows are then copied by the GPUs' copy engines, and streams signal to each other by writing and
waiting for 64-bit words, so that a transfer takes no multiprocessor from the matrix products beside it. Only what is
too small or too scattered for a copy engine is written by a kernel of a few blocks (:mod:`distca.transport.writer`).

The block: [ranks] words "newest exchange that arrived from rank r", [ranks] words "up to here rank r has taken out",
then the landing memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from distca.transport import native
from distca.transport.fabric import Put
from distca.transport.transport import Part, TransportError
from distca.transport.watchdog import Process, Wait, Watchdog
from distca.transport.writer import Addresses, Sent, Writer

_PAGE = 4096


class NvshmemFabric:
    """This rank's symmetric memory and its peers'.

    Args:
        group: the server pool, all on one node; created once per process, by all ranks together.
        capacity: bytes of landing memory.

    Attributes:
        writer: queues this rank's writes.

    Raises:
        TransportError: NVSHMEM cannot be initialised, or a peer's memory cannot be mapped.
    """

    def __init__(self, group: dist.ProcessGroup, capacity: int) -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        words = -(-2 * self.ranks * 8 // _PAGE) * _PAGE
        _initialize(group, words + capacity)
        import nvshmem.core
        from nvshmem import bindings

        self._memory = nvshmem.core.bytetensor((words + capacity,), release=True, except_on_del=False)
        self._memory[:words].zero_()
        torch.cuda.synchronize()
        dist.barrier(group)
        self.landing = self._memory[words:]
        self._words = self._memory[: 2 * self.ranks * 8].view(torch.int64)
        # Its own, so that the watchdog never waits behind anything.
        self._looking = native.create_stream(0)
        self._seen = torch.empty(2 * self.ranks, dtype=torch.int64, pin_memory=True)
        processes = [Process.here()] * self.ranks
        dist.all_gather_object(processes, Process.here(), group=group)
        names = dist.get_process_group_ranks(group)
        self._watchdog = Watchdog(names, self.rank, processes, self._missing)
        base = self._memory.data_ptr()
        bases = [base if peer == self.rank else bindings.ptr(base, peer) for peer in range(self.ranks)]
        unreachable = [peer for peer, address in enumerate(bases) if not address]
        if unreachable:
            raise TransportError(
                f"Rank {names[self.rank]} cannot map the memory of ranks {[names[peer] for peer in unreachable]}: "
                "their GPUs have no peer access. "
                "Set cad.transport=nccl."
            )
        # Words of this rank that peers write, and words of peers that this rank writes.
        self._arrived_here = native.addresses_of(base, range(self.ranks))
        others = [address for peer, address in enumerate(bases) if peer != self.rank]
        self._taken_there = np.array([address + 8 * (self.ranks + self.rank) for address in others], np.uint64)
        addresses = Addresses(
            landings=[address + words for address in bases],
            taken_here=native.addresses_of(base, range(self.ranks, 2 * self.ranks)),
            arrived_there=np.array([address + 8 * self.rank for address in bases], np.uint64),
        )
        self.writer = Writer(addresses, self.landing.device)

    def put(self, number: int, reuses: int, puts: dict[int, list[Put]]) -> Sent:
        return self.writer.put(number, reuses, puts)

    def keep(self, parts: Sequence[Part], behind: Sent | None) -> Sent | None:
        return self.writer.keep(parts, behind)

    def join(self, token: Sent) -> None:
        token.wait()
        if token.peers and token.reuses:
            self._watch(token.peers, token.reuses, "room that is taken by")

    def arrived(self, number: int, peers: Sequence[int]) -> None:
        if peers:
            native.wait_for(self._arrived_here[list(peers)], number, torch.cuda.current_stream())
            self._watch(peers, number, "rows of")

    def taken(self, number: int) -> None:
        if len(self._taken_there):
            native.signal(self._taken_there, number, torch.cuda.current_stream())

    def _watch(self, peers: Sequence[int], number: int, what: str) -> None:
        event = torch.cuda.Event()
        event.record()
        self._watchdog.note(Wait(event, tuple(peers), number, what))

    def _missing(self, wait: Wait) -> list[int]:
        """Peers whose word is below what a wait asks for; called by the watchdog's thread."""
        with torch.cuda.device(self.landing.device), torch.cuda.stream(self._looking):
            self._seen.copy_(self._words, non_blocking=True)
            self._looking.synchronize()
        words = self._seen.tolist()
        first = 0 if wait.what == "rows of" else self.ranks
        return [peer for peer in wait.peers if words[first + peer] < wait.number]


def _initialize(group: dist.ProcessGroup, heap_bytes: int) -> None:
    """Start NVSHMEM over the ranks of ``group``; once per process."""
    # Read by NVSHMEM when it starts. 16 MiB are its own.
    os.environ["NVSHMEM_SYMMETRIC_SIZE"] = str(heap_bytes + (16 << 20))
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")  # multicast memory, which nothing here uses
    os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")  # one node
    import nvshmem.core
    from cuda.core import Device

    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    uid = nvshmem.core.get_unique_id(empty=rank != 0)
    box: list[Any] = [uid._data.tobytes()]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    uid._data.view(np.uint8)[:] = np.frombuffer(box[0], np.uint8)
    device = Device(torch.cuda.current_device())
    device.set_current()
    try:
        nvshmem.core.init(device=device, uid=uid, rank=rank, nranks=ranks, initializer_method="uid")
    except Exception as error:
        where = dist.get_global_rank(group, rank)
        raise TransportError(f"NVSHMEM does not start on rank {where}: {error}. Set cad.transport=nccl.") from error
