"""Copies numpy arrays from the host to a device: a single array, or all arrays of a step in a few transfers.

A background thread makes dozens of small index arrays for each step. Every call that pins or copies memory releases
Python's lock to the training thread, and has to wait until it gets the lock back. So there should be few such calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_FIRST_BYTES = 4 << 20
"""Bytes of an upload's first chunk."""
_ALIGNMENT = 128  # bytes; a cache line, more than any vectorised read of an index needs


class Upload:
    """Collects host arrays and copies them to a device together.

    :meth:`add` returns an array's tensor at once. :meth:`send` starts the copies: work that is then queued on the
    current stream reads the values. The tensors are parts of a few chunks of memory. A chunk lives as long as any of
    its tensors.

    Args:
        device: the device of the tensors; copies to a GPU do not block the host.
        first_bytes: bytes of the first chunk. Each further chunk has twice the bytes of the previous one, or as many as
            an array needs.
    """

    def __init__(self, device: torch.device | str, first_bytes: int = _FIRST_BYTES) -> None:
        self._device = torch.device(device)
        self._next_bytes = first_bytes
        self._chunks: list[_Chunk] = []
        self._sent = False

    def add(self, array: np.ndarray) -> torch.Tensor:
        """Returns the tensor on the device that gets the array's values, with its dtype and shape."""
        assert not self._sent, "an upload is sent once"
        if not self._chunks or not self._chunks[-1].has_room(array.nbytes):
            size = max(self._next_bytes, array.nbytes)
            self._chunks.append(_Chunk(size, self._device))
            self._next_bytes = 2 * size
        return self._chunks[-1].put(array)

    def send(self) -> None:
        """Starts the copies."""
        self._sent = True
        for chunk in self._chunks:
            chunk.send()
        self._chunks = []


Destination = torch.device | str | Upload
"""The destination of an array: a device for a copy at once, or an upload, which is sent later."""


def to_device(array: np.ndarray, to: Destination) -> torch.Tensor:
    """Returns a host array's tensor on a device, without waiting for the GPU."""
    if isinstance(to, Upload):
        return to.add(array)
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if torch.device(to).type == "cuda":
        return tensor.pin_memory().to(to, non_blocking=True)
    return tensor.to(to)


@contextmanager
def uploading(to: Destination) -> Iterator[Upload]:
    """Gives a new upload to a device, and sends it at the end of the ``with`` block.

    If ``to`` is an upload already, it gives this one and leaves sending to its owner."""
    if isinstance(to, Upload):
        yield to
        return
    upload = Upload(to)
    yield upload
    upload.send()


class _Chunk:
    """A block of host memory, pinned for a GPU, and a block of the same size on the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._used = -(-size // _ALIGNMENT) * _ALIGNMENT, 0
        self._here = torch.empty(self._size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._there = torch.empty(self._size, dtype=torch.uint8, device=device)
        self._here_bytes = self._here.numpy()
        self._there_by_dtype: dict[np.dtype, torch.Tensor] = {}

    def has_room(self, size: int) -> bool:
        return self._used + size <= self._size

    def put(self, array: np.ndarray) -> torch.Tensor:
        begin, end = self._used, self._used + array.nbytes
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        np.copyto(self._here_bytes[begin:end].view(array.dtype), array.reshape(-1))
        if array.dtype not in self._there_by_dtype:
            dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
            self._there_by_dtype[array.dtype] = self._there.view(dtype)
        part = self._there_by_dtype[array.dtype][begin // array.itemsize : end // array.itemsize]
        return part if array.ndim == 1 else part.view(array.shape)

    def send(self) -> None:
        self._there[: self._used].copy_(self._here[: self._used], non_blocking=True)
