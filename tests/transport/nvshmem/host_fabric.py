"""A fabric in shared host memory: the one-sided transport on CPU ranks, for tests.

What streams do on GPUs happens at once here: waits spin on the host. Only copies of kept rows are put off until they
are waited for, so that nobody relies on them earlier.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from distca.transport.cuda_ops import row_bytes
from distca.transport.interface import Part
from distca.transport.nvshmem.interface import Put

_PATIENCE_S = 30.0


class HostFabric:
    """RingPlace memory of all ranks in one mapped file; every rank creates it together.

    Args:
        capacity: bytes of receive buffer per rank.
        slow_rank: a rank that takes its time before it reads what arrived.
        longest: the most bytes of a row; None for any.
    """

    def __init__(self, capacity: int, slow_rank: int | None = None, longest: int | None = None) -> None:
        self._longest = longest
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        path = [tempfile.mktemp(prefix="distca-fabric-") if self.rank == 0 else ""]
        dist.broadcast_object_list(path)
        slots = 2 * self.ranks * 8
        self._size = slots + capacity
        if self.rank == 0:
            with open(path[0], "wb") as file:
                file.truncate(self._size * self.ranks)
        dist.barrier()
        memory = np.memmap(path[0], np.uint8, "r+")
        dist.barrier()
        if self.rank == 0:
            os.unlink(path[0])
        blocks = [memory[rank * self._size : (rank + 1) * self._size] for rank in range(self.ranks)]
        self._arrived = [block[: 8 * self.ranks].view(np.uint64) for block in blocks]
        self._consumed = [block[8 * self.ranks : slots].view(np.uint64) for block in blocks]
        self._receive_buffers = [block[slots:] for block in blocks]
        self._slow = self.rank == slow_rank
        self.receive_buffer = torch.from_numpy(self._receive_buffers[self.rank])
        self.waits_for_room = 0

    def why_not_row(self, row_bytes: int) -> str | None:
        return None if self._longest is None or row_bytes <= self._longest else f"a row has {row_bytes} bytes"

    def put(self, number: int, reuses: int, puts: dict[int, list[Put]]) -> None:
        for peer, pieces in puts.items():
            if self._consumed[self.rank][peer] < reuses:
                self.waits_for_room += 1
            self._wait(self._consumed[self.rank], peer, reuses)
            for piece in pieces:
                source = piece.source.reshape(-1).view(torch.uint8).numpy()
                width = piece.row_bytes
                for row, place, rows in piece.ranges.tolist():
                    at = piece.begin + place * width
                    self._receive_buffers[peer][at : at + rows * width] = source[row * width : (row + rows) * width]
            self._arrived[peer][self.rank] = number

    def keep(self, parts: Sequence[Part], behind: None) -> Callable[[], None]:
        def copy() -> None:
            for part in parts:
                source, destination = (x.reshape(-1).view(torch.uint8).numpy() for x in (part.source, part.destination))
                width = row_bytes(part.source)
                for row, place, rows in part.moves.keep_ranges.tolist():
                    destination[place * width : (place + rows) * width] = source[row * width : (row + rows) * width]

        return copy

    def join(self, token: Callable[[], None] | None) -> None:
        if token is not None:
            token()

    def arrived(self, number: int, peers: Sequence[int]) -> None:
        if self._slow:
            time.sleep(0.002)
        for peer in peers:
            self._wait(self._arrived[self.rank], peer, number)

    def beside(self, work: Callable[[], None]) -> None:
        work()

    def compute(self, work: Callable[[], None]) -> None:
        work()

    def consumed(self, number: int) -> None:
        for peer in range(self.ranks):
            self._consumed[peer][self.rank] = number

    def _wait(self, slots: np.ndarray, peer: int, value: int) -> None:
        end = time.monotonic() + _PATIENCE_S
        while slots[peer] < value:
            time.sleep(0)
            if time.monotonic() > end:
                raise TimeoutError(f"Rank {self.rank} waited {_PATIENCE_S:.0f} s for rank {peer}.")
