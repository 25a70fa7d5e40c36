"""NVSHMEM inside one node: symmetric memory that peers map, copy engines that write into it, signals in memory.

NVSHMEM gives every rank a block of memory at a known place and the addresses under which its peers' blocks can be
reached over NVLink. Rows are then copied by the GPUs' copy engines, and streams signal to each other by writing and
waiting for 64-bit words, so that a transfer takes no multiprocessor from the matrix products beside it. Only what is
too small or too scattered for a copy engine is written by a kernel of a few blocks.

The block: [ranks] words "newest exchange that arrived from rank r", [ranks] words "up to here rank r has taken out",
then the landing memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from distca.transport import native
from distca.transport.fabric import Put
from distca.transport.transport import TransportError
from distca.transport.watchdog import Process, Wait, Watchdog

_PAGE = 4096
# Below these a kernel writes: it starts sooner than a copy engine. Alone it is faster up to about 64 MiB to a peer
# (benchmarks/results/transport.json), but it takes multiprocessors from the computation beside it.
_PUSH_BELOW_BYTES = 8 << 20
_PUSH_BELOW_BYTES_PER_RANGE = 128 << 10


class NvshmemFabric:
    """This rank's symmetric memory and its peers'.

    Args:
        group: the server pool, all on one node; created once per process, by all ranks together.
        capacity: bytes of landing memory.

    Attributes:
        push_below_bytes: what one rank sends to another is written by a kernel if it is smaller in all,
        push_below_bytes_per_range: or on average over its ranges of rows; else by copy engine.

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
        self._looking = torch.cuda.Stream()
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
        self._landings = [address + words for address in bases]
        # Words of this rank that peers write, and words of peers that this rank writes.
        self._arrived_here = native.addresses_of(base, range(self.ranks))
        self._taken_here = native.addresses_of(base, range(self.ranks, 2 * self.ranks))
        self._arrived_there = np.array([address + 8 * self.rank for address in bases], np.uint64)
        others = [address for peer, address in enumerate(bases) if peer != self.rank]
        self._taken_there = np.array([address + 8 * (self.ranks + self.rank) for address in others], np.uint64)
        self.push_below_bytes = _PUSH_BELOW_BYTES
        self.push_below_bytes_per_range = _PUSH_BELOW_BYTES_PER_RANGE
        self._finished_blocks = torch.zeros(self.ranks, dtype=torch.int32, device="cuda")
        # Engines that copy to several peers at once are slower in all than one after the other, so copies follow each
        # other in one stream; what kernels write has a stream for each peer. Both go before anything else that is
        # ready.
        self._copying = torch.cuda.Stream(priority=-1)
        self._pushing = {peer: torch.cuda.Stream(priority=-1) for peer in range(self.ranks) if peer != self.rank}
        self._last: dict[int, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}

    def put(self, number: int, reuses: int, puts: dict[int, list[Put]]) -> Sent:
        ready = torch.cuda.Event()
        ready.record()
        events = []
        for peer, pieces in puts.items():
            by_kernel = self._is_small(pieces)
            stream = self._pushing[peer] if by_kernel else self._copying
            stream.wait_event(ready)
            # The word of arrivals only tells the newest: exchanges must arrive in order, whichever way they take.
            if peer in self._last and self._last[peer][0] is not stream:
                stream.wait_event(self._last[peer][1])
            (self._push if by_kernel else self._copy)(peer, pieces, number, reuses)
            done = torch.cuda.Event()
            done.record(stream)
            self._last[peer] = stream, done
            events.append(done)
        sources = tuple(piece.source for pieces in puts.values() for piece in pieces)
        return Sent(events, sources, tuple(puts), reuses)

    def _is_small(self, pieces: list[Put]) -> bool:
        ranges = sum(len(piece.ranges) for piece in pieces)
        limit = max(self.push_below_bytes, ranges * self.push_below_bytes_per_range)
        return bool(pieces) and sum(piece.bytes for piece in pieces) < limit

    def _copy(self, peer: int, pieces: list[Put], number: int, reuses: int) -> None:
        stream = self._copying
        if reuses:
            native.wait_for(self._taken_here[peer : peer + 1], reuses, stream)
        for piece in pieces:
            destination = self._landings[peer] + piece.begin
            native.put_rows(piece.source.data_ptr(), destination, piece.ranges, piece.row_bytes, stream)
        native.signal(self._arrived_there[peer : peer + 1], number, stream)

    def _push(self, peer: int, pieces: list[Put], number: int, reuses: int) -> None:
        stream = self._pushing[peer]
        if reuses:
            # On the stream, so that a late peer does not keep blocks of the kernel spinning on multiprocessors.
            native.wait_for(self._taken_here[peer : peer + 1], reuses, stream)
        room = (int(self._taken_here[peer]), reuses)
        for piece in pieces:
            destination = self._landings[peer] + piece.begin + int(piece.ranges[0, 1]) * piece.row_bytes
            signal = int(self._arrived_there[peer]) if piece is pieces[-1] else None
            counter = self._finished_blocks[peer : peer + 1]
            native.push_rows(
                piece.source, piece.rows, destination, room, (signal, number), counter, self._pushing[peer]
            )

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
            words = self._words.cpu().tolist()
        first = 0 if wait.what == "rows of" else self.ranks
        return [peer for peer in wait.peers if words[first + peer] < wait.number]


@dataclass
class Sent:
    """Writes of one exchange to ``peers``, which had to take out exchange ``reuses`` first; ``sources`` live until they
    were waited for."""

    events: list[torch.cuda.Event]
    sources: tuple[torch.Tensor, ...]
    peers: tuple[int, ...]
    reuses: int

    def wait(self) -> None:
        """Let the current stream wait until the sources were read."""
        for event in self.events:
            torch.cuda.current_stream().wait_event(event)


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
