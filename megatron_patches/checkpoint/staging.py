"""Copies a checkpoint's tensors to host memory, so that training goes on while they are written to the disk.

On a GPU the copies run on a stream of their own, beside the forward and backward of the next step, which change no
weights. Only the optimizer's update waits for the copies (:meth:`HostStaging.before_update`). ``writer.py`` copies and
writes; ``distca/train/checkpoint/saver.py`` owns the memory.
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
"""Each copy begins at a multiple of so many bytes, so that it can be viewed as a tensor of any type."""
_USABLE = 0.8
"""The largest part of a node's free host memory that copies may take; the rest is left for training. If copies need
more, nothing is copied, and training waits while checkpoints are written. The number was chosen, not measured."""


class HostStaging:
    """Host memory of one rank for the tensors of a checkpoint. The memory is kept and used for the next checkpoint.

    All ranks make one together.

    Args:
        device: the tensors' device.

    Attributes:
        group: a gloo group of all ranks, by which the threads that write agree.
    """

    def __init__(self, device: torch.device) -> None:
        self.group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._memory, self._is_pinned = torch.empty(0, dtype=torch.uint8), False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._warned = False

    def copy(self, tensors: Sequence[ShardedTensor]) -> bool:
        """Starts to copy tensors, and puts the copies in their places; all ranks call it together.

        Args:
            tensors: descriptions of tensors, whose ``data`` becomes the copy.

        Returns:
            True on all ranks; or False on all ranks if some node has too little memory. Then no tensor is changed.
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
        """Makes this GPU's current stream wait for the copies, before it changes the tensors."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Waits until the copies are complete. It also makes this rank's GPU the current one of the calling thread."""
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)
        if self._copied is not None:
            self._copied.synchronize()

    def close(self) -> None:
        """Frees the memory, after the last checkpoint was written."""
        if self._is_pinned:
            page_unlock(self._memory)
        self._memory, self._is_pinned = torch.empty(0, dtype=torch.uint8), False

    def _copy(self, tensors: Sequence[ShardedTensor], places: Sequence[int]) -> None:
        """Copies each tensor to its place in the memory, counted in bytes."""
        for each, place in zip(tensors, places, strict=True):
            values = each.data.detach().contiguous()
            if self._stream is not None and values.is_cuda:
                values.record_stream(self._stream)
            there = self._memory[place : place + values.nbytes].view(values.dtype).view(values.shape)
            each.data = there.copy_(values, non_blocking=True)

    def _has_room(self, more: int) -> bool:
        """Whether every node has room for what its ranks need; ``more`` is the bytes that this rank has to allocate."""
        need, free = fullest_node(more, free_host_memory(), self.group)
        if need > _USABLE * free:
            self._warn(need, free)
            return False
        return True

    def _warn(self, need: int, free: int) -> None:
        """Logs once, on rank 0, that training waits for checkpoints; ``need`` and ``free`` are bytes of a node."""
        if dist.get_rank() == 0 and not self._warned:
            logger.warning(
                "Training waits while checkpoints are written: copies of them need %.1f GiB of host memory on a node, "
                "of which %.1f GiB are free there.",
                *(need / 2**30, free / 2**30),
            )
        self._warned = True

    def _take(self, size: int) -> None:
        """Allocates memory in place of the smaller one; pinned for a GPU, unless CUDA refuses."""
        self.close()
        self._memory = torch.empty(size, dtype=torch.uint8)
        self._is_pinned = self._stream is not None and page_lock(self._memory)
