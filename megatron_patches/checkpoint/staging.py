"""Copies a checkpoint's tensors to host memory, so that training goes on while the copies are written to the disk.

A GPU copies tensors on a separate stream while the next step runs. The optimizer's update changes the tensors, so it
waits for the copies (:meth:`HostStaging.before_update`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from distca.cluster.timeout import TIMEOUT
from distca.cluster.topology import fullest_node
from distca.device.host_memory import free_host_memory
from distca.device.memory import page_lock, page_unlock

logger = logging.getLogger(__name__)

_ALIGNMENT = 128
"""Each copy begins at a multiple of this many bytes, so that the copy can be viewed as a tensor of any dtype."""
_USABLE = 0.8
"""The largest fraction of a node's free host memory that may be allocated for copies. If copies need more, nothing is
copied, and training waits while checkpoints are written. The number was chosen, not measured."""


class HostStaging:
    """One rank's host memory for copies of each checkpoint's tensors.

    All ranks call the constructor together.

    Attributes:
        group: a gloo group of all ranks, used also by threads that write checkpoints.
    """

    def __init__(self, device: torch.device) -> None:
        self.group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._memory, self._is_pinned = torch.empty(0, dtype=torch.uint8), False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._warned = False

    def copy(self, tensors: Sequence[ShardedTensor]) -> bool:
        """Starts to copy the ``data`` of each of ``tensors``, and replaces ``data`` by the copy.

        All ranks call this method together. If a node has too little memory, no rank copies anything, and all ranks
        return False. Otherwise all return True.
        """
        places, size = [], 0
        for each in tensors:
            places.append(size)
            size += -(-each.data.nbytes // _ALIGNMENT) * _ALIGNMENT
        if not self._has_room(max(0, size - len(self._memory))):
            return False
        if size > len(self._memory):
            self._take(size)
        if self._stream is None:
            self._copy(tensors, places)
            return True
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(tensors, places)
            self._copied = torch.cuda.Event()
            self._copied.record()
        return True

    def before_update(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Waits until the copies are complete. The calling thread's current device becomes this rank's GPU."""
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)
        if self._copied is not None:
            self._copied.synchronize()

    def close(self) -> None:
        if self._is_pinned:
            page_unlock(self._memory)
        self._memory, self._is_pinned = torch.empty(0, dtype=torch.uint8), False

    def _copy(self, tensors: Sequence[ShardedTensor], places: Sequence[int]) -> None:
        for each, place in zip(tensors, places, strict=True):
            values = each.data.detach().contiguous()
            if self._stream is not None and values.is_cuda:
                values.record_stream(self._stream)
            there = self._memory[place : place + values.nbytes].view(values.dtype).view(values.shape)
            each.data = there.copy_(values, non_blocking=True)

    def _has_room(self, more: int) -> bool:
        """Whether each node has enough free memory for all its ranks; this rank needs ``more`` bytes."""
        need, free = fullest_node(more, free_host_memory(), self.group)
        if need > _USABLE * free:
            self._warn(need, free)
            return False
        return True

    def _warn(self, need: int, free: int) -> None:
        """Logs once, on rank 0; ``need`` and ``free`` are bytes of a node."""
        if dist.get_rank() == 0 and not self._warned:
            logger.warning(
                "Training waits while checkpoints are written: copies need %.1f GiB more of host memory on a node, and "
                "may take %.1f GiB, %.0f%% of the free memory there.",
                *(need / 2**30, _USABLE * free / 2**30, 100 * _USABLE),
            )
        self._warned = True

    def _take(self, size: int) -> None:
        """Allocates larger memory, pinned if tensors are on a GPU and CUDA does not refuse."""
        self.close()
        self._memory = torch.empty(size, dtype=torch.uint8)
        self._is_pinned = self._stream is not None and page_lock(self._memory)
