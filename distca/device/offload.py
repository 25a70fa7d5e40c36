"""Keeps tensors that backward needs in host memory; copies run beside the computation, on a stream of their own.

To *park* a tensor is to start its copy to the host. The GPU keeps the last few parked tensors. When one more is parked,
the computing stream waits for the copy of the oldest of these, and its GPU memory becomes free. So GPU memory is
bounded, however far the host runs ahead of the GPU.

Backward takes tensors in about the reverse order of parking. So when it takes one, the copies of a few tensors that
were parked before it start as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import nullcontext

import torch

from distca.device.event import Event
from distca.device.host_memory import free_host_memory
from distca.device.memory import page_lock, page_unlock
from distca.device.sizes import PARKED_TENSORS, STAYING_NANO_BATCHES
from distca.errors import SupportError

WINDOW, AHEAD = STAYING_NANO_BATCHES * PARKED_TENSORS, PARKED_TENSORS
"""The number of latest parked tensors that stay on the GPU, and the number of tensors that come back before they are
taken."""
CHUNK_BYTES = 1 << 30
"""The bytes by which the host memory grows when it is full."""
_ALIGNMENT = 128
"""Bytes of which a tensor's place in host memory is a multiple."""


class Parked:
    """A parked tensor, or a part of one. Once no object refers to any parked tensor, their host memory is used anew."""

    def __init__(self, offload: Offload, entry: _Entry, first: int, shape: torch.Size) -> None:
        self._offload, self._entry, self._first, self._shape = offload, entry, first, shape

    def take(self) -> torch.Tensor:
        """Returns the tensor on its device, for work that is queued on the current stream from now on."""
        whole = self._offload._take(self._entry)
        return whole[self._first : self._first + self._shape.numel()].view(self._shape)


def taken(kept: torch.Tensor | Parked) -> torch.Tensor:
    """Returns a tensor that was kept for backward, parked or not, on its device."""
    return kept.take() if isinstance(kept, Parked) else kept


class Offload:
    """One rank's parked tensors and the host memory for them, which is page-locked for a GPU and never shrinks.

    Args:
        device: the device of the tensors; on CPUs copies are done at once.
        window: number of latest parked tensors that stay on the device.
        ahead: number of tensors that come back before they are taken.
        chunk_bytes: bytes by which the host memory grows when it is full.
    """

    def __init__(
        self, device: torch.device, window: int = WINDOW, ahead: int = AHEAD, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._window, self._ahead = window, ahead
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._memory = _HostMemory(chunk_bytes, locked=self._stream is not None)
        self._alive: weakref.WeakValueDictionary[int, _Entry] = weakref.WeakValueDictionary()
        # By number of the entry: parked tensors that are still on the device, in the order of parking; and tensors that
        # are on their way back. With each the end of its copy.
        self._leaving: dict[int, tuple[torch.Tensor, Event | None]] = {}
        self._coming: dict[int, tuple[torch.Tensor, Event | None]] = {}
        self._parked = 0

    def park(self, tensor: torch.Tensor) -> Parked:
        """Starts to copy a tensor to the host. The caller must not change the tensor afterwards.

        A tensor that lies within one of the last ``window`` parked tensors is not copied once more.

        Raises:
            SupportError: too little host memory is free.
        """
        tensor = tensor.detach().contiguous()
        entry = self._found(tensor) or self._leave(tensor.view(-1))
        first = (tensor.data_ptr() - entry.address) // tensor.itemsize
        return Parked(self, entry, first, tensor.shape)

    def saved_tensors(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Returns a context in which autograd parks the tensors that it saves for backward."""
        return torch.autograd.graph.saved_tensors_hooks(self.park, Parked.take)

    def _found(self, tensor: torch.Tensor) -> _Entry | None:
        """Returns the entry of a parked tensor that is still on the device and contains ``tensor``, or None."""
        begin = tensor.data_ptr()
        for number, (held, _) in self._leaving.items():
            within = held.data_ptr() <= begin < begin + tensor.nbytes <= held.data_ptr() + held.nbytes
            if within and held.dtype == tensor.dtype:
                return self._alive.get(number)
        return None

    def _leave(self, flat: torch.Tensor) -> _Entry:
        """Starts the copy of a one-dimensional tensor to the host; lets older tensors go from the device."""
        if not self._alive:
            self._memory.start_over()
            for _, copied in self._coming.values():  # a backward was not finished
                _wait(copied)
            self._coming.clear()
        entry = _Entry(self._parked, flat, self._memory.take(flat.nbytes))
        self._parked += 1
        self._alive[entry.number] = entry
        self._copy(entry, out=True)
        self._leaving[entry.number] = (flat, entry.copied)
        while len(self._leaving) > self._window:
            number = next(iter(self._leaving))
            _wait(self._leaving.pop(number)[1])
            if (gone := self._alive.get(number)) is not None:
                gone.here = None
        return entry

    def _take(self, entry: _Entry) -> torch.Tensor:
        """Returns an entry's tensor on the device; starts the way back of some that were parked before it."""
        for number in range(entry.number, entry.number - self._ahead - 1, -1):
            if (each := self._alive.get(number)) is not None and each.here is None:
                each.here = torch.empty(each.elements, dtype=each.dtype, device=each.device)
                self._copy(each, out=False)
                self._coming[each.number] = (each.here, each.copied)
        _wait(entry.copied)
        entry.copied = None
        self._leaving.pop(entry.number, None)
        self._coming.pop(entry.number, None)
        assert entry.here is not None
        return entry.here

    def _copy(self, entry: _Entry, out: bool) -> None:
        """Copies between device and host on the stream of copies, behind the current stream's work so far."""
        assert entry.here is not None
        if self._stream is not None:
            reached = Event()
            reached.record()
            reached.wait(self._stream)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            here, done = entry.here.view(torch.uint8), 0
            for there in self._memory.pieces(entry.place, here.nbytes):
                part = here[done : done + len(there)]
                source, target = (part, there) if out else (there, part)
                target.copy_(source, non_blocking=True)
                done += len(there)
        if self._stream is not None:
            entry.copied = Event()
            entry.copied.record(self._stream)


class _Entry:
    """One parked tensor.

    Attributes:
        number: its number in the order of parking.
        place: its first byte in host memory.
        here: the flat tensor on the device; None while it is on the host only.
        copied: the end of its last copy; None on CPUs, and after the tensor was taken.
    """

    def __init__(self, number: int, flat: torch.Tensor, place: int) -> None:
        self.number, self.place = number, place
        self.here: torch.Tensor | None = flat
        self.copied: Event | None = None
        self.elements, self.dtype, self.device = flat.numel(), flat.dtype, flat.device
        self.address = flat.data_ptr()  # on the device, when it was parked


class _HostMemory:
    """A growing range of bytes in host memory, made of chunks. A tensor may lie across the border of two chunks."""

    def __init__(self, chunk_bytes: int, locked: bool) -> None:
        self._chunk_bytes, self._locked, self._used = chunk_bytes, locked, 0
        self._chunks: list[torch.Tensor] = []
        if locked:
            weakref.finalize(self, _unlock, self._chunks).atexit = False

    @property
    def size(self) -> int:
        return len(self._chunks) * self._chunk_bytes

    def start_over(self) -> None:
        """Makes all places free again."""
        self._used = 0

    def take(self, size: int) -> int:
        """Returns the first byte of a new place of ``size`` bytes."""
        begin, self._used = self._used, self._used + -(-size // _ALIGNMENT) * _ALIGNMENT
        while self.size < self._used:
            self._grow()
        return begin

    def _grow(self) -> None:
        free, chunk = free_host_memory(), torch.empty(self._chunk_bytes, dtype=torch.uint8)
        if free < self._chunk_bytes or (self._locked and not page_lock(chunk)):
            raise SupportError(
                f"offload is True, and this rank has {self.size / 2**30:.1f} GiB in host memory and needs "
                f"{self._chunk_bytes / 2**30:.1f} more, but {free / 2**30:.1f} are free, or cannot be page-locked: set "
                "offload to False, or have fewer tokens per rank."
            )
        self._chunks.append(chunk)

    def pieces(self, begin: int, size: int) -> Iterator[torch.Tensor]:
        """Yields the bytes of a place: one tensor, or one for each chunk over which it lies."""
        end = begin + size
        while begin < end:
            number, within = divmod(begin, self._chunk_bytes)
            part = self._chunks[number][within : within + end - begin]
            yield part
            begin += len(part)


def _unlock(chunks: list[torch.Tensor]) -> None:
    torch.cuda.synchronize()
    for chunk in chunks:
        page_unlock(chunk)


def _wait(event: Event | None) -> None:
    """Makes the current stream wait for a copy."""
    if event is not None:
        event.wait(torch.cuda.current_stream())
