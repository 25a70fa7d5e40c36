"""Bringing host arrays to a device: one, or all of a step's in a few transfers.

A step's routes are dozens of small index arrays, made in a background thread. Each call that pins or copies one lets
the training thread have the interpreter and waits to get it back, so there should be few.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_FIRST_BYTES = 4 << 20
_ALIGNMENT = 128  # bytes; a cache line, more than any vectorised read of an index needs


class Upload:
    """Collects host arrays and brings them to a device together.

    :meth:`add` hands out each array's tensor at once; its values are there after :meth:`send`, for work that is queued
    on the current stream from then on. The tensors are parts of a few chunks of memory, which live as long as any of
    them.

    Args:
        device: where the arrays go; copies to a GPU do not block the host.
        first_bytes: size of the first chunk; every further one is twice as large as the one before, or as large as an
            array needs.
    """

    def __init__(self, device: torch.device | str, first_bytes: int = _FIRST_BYTES) -> None:
        self._device = torch.device(device)
        self._next_bytes = first_bytes
        self._chunks: list[_Chunk] = []
        self._sent = False

    def add(self, array: np.ndarray) -> torch.Tensor:
        """The tensor that ``array`` will be in: its dtype and shape, on the device."""
        assert not self._sent, "an upload is sent once"
        if not self._chunks or not self._chunks[-1].has_room(array.nbytes):
            size = max(self._next_bytes, array.nbytes)
            self._chunks.append(_Chunk(size, self._device))
            self._next_bytes = 2 * size
        return self._chunks[-1].put(array)

    def send(self) -> None:
        """Start the transfers."""
        self._sent = True
        for chunk in self._chunks:
            chunk.send()
        self._chunks = []


Destination = torch.device | str | Upload
"""The destination of a host array: a device, which gets it now, or an upload that somebody sends later."""


def to_device(array: np.ndarray, to: Destination) -> torch.Tensor:
    """Copy a host array to a device without waiting for the GPU."""
    if isinstance(to, Upload):
        return to.add(array)
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if torch.device(to).type == "cuda":
        return tensor.pin_memory().to(to, non_blocking=True)
    return tensor.to(to)


@contextmanager
def uploading(to: Destination) -> Iterator[Upload]:
    """An upload that is sent at the end of the context; one that was begun elsewhere is passed on, and sent there."""
    if isinstance(to, Upload):
        yield to
        return
    upload = Upload(to)
    yield upload
    upload.send()


class _Chunk:
    """Host memory, pinned for a GPU, and as much on the device."""

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
