"""Tensors that wait for backward in host memory, copied beside the computation.

A tensor that is parked is copied out on a stream of its own. The GPU holds the last few that were parked, and then the
stream that computes waits for their copies before it lets them go: memory is bounded however far the host is ahead,
and it goes back to the stream that it came from. Backward takes tensors in about the reverse order, so that those which
were parked before one that is taken begin to come back with it.
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
"""Tensors that stay on the GPU after they were parked, and that come back ahead."""
CHUNK_BYTES = 1 << 30
"""Host memory is taken in pieces of this size."""
_ALIGNMENT = 128


class Parked:
    """A tensor that waits in host memory, or a part of one; what nobody holds any more makes room for others."""

    def __init__(self, offload: Offload, entry: _Entry, first: int, shape: torch.Size) -> None:
        self._offload, self._entry, self._first, self._shape = offload, entry, first, shape

    def take(self) -> torch.Tensor:
        """It on its device again, for work that is queued on the current stream from now on."""
        whole = self._offload._take(self._entry)
        return whole[self._first : self._first + self._shape.numel()].view(self._shape)


def taken(kept: torch.Tensor | Parked) -> torch.Tensor:
    """A tensor that was kept for backward, on its device."""
    return kept.take() if isinstance(kept, Parked) else kept


class Offload:
    """Host memory of one rank, which grows to what was parked at once, page-locked for a GPU.

    Args:
        device: of the tensors; on CPUs they are copied at once.
        window: so many tensors that were parked last stay on the device.
        ahead: so many tensors come back before they are taken.
        chunk_bytes: host memory is taken in pieces of this size.
    """

    def __init__(
        self, device: torch.device, window: int = WINDOW, ahead: int = AHEAD, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._window, self._ahead = window, ahead
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._memory = _HostMemory(chunk_bytes, locked=self._stream is not None)
        self._alive: weakref.WeakValueDictionary[int, _Entry] = weakref.WeakValueDictionary()
        self._leaving: dict[int, tuple[torch.Tensor, Event | None]] = {}  # by number, in the order of parking
        self._coming: dict[int, tuple[torch.Tensor, Event | None]] = {}
        self._parked = 0

    def park(self, tensor: torch.Tensor) -> Parked:
        """Begin to copy a tensor out. It is not changed from then on. What was parked just before, also as a part of
        another tensor, is not copied again.

        Raises:
            SupportError: too little host memory is left.
        """
        tensor = tensor.detach().contiguous()
        entry = self._found(tensor) or self._leave(tensor.view(-1))
        first = (tensor.data_ptr() - entry.address) // tensor.itemsize
        return Parked(self, entry, first, tensor.shape)

    def saved_tensors(self) -> torch.autograd.graph.saved_tensors_hooks:
        """A context in which autograd parks what it saves."""
        return torch.autograd.graph.saved_tensors_hooks(self.park, Parked.take)

    def _found(self, tensor: torch.Tensor) -> _Entry | None:
        begin = tensor.data_ptr()
        for number, (held, _) in self._leaving.items():
            within = held.data_ptr() <= begin < begin + tensor.nbytes <= held.data_ptr() + held.nbytes
            if within and held.dtype == tensor.dtype:
                return self._alive.get(number)
        return None

    def _leave(self, flat: torch.Tensor) -> _Entry:
        if not self._alive:
            self._memory.start_over()
            for _, copied in self._coming.values():  # of a backward that was not finished
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
        """Between an entry's memory on the device, which the current stream may have to itself first, and the host."""
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
    """One copy: its number, its place in host memory, the tensor while it is ``here``, and the end of its last copy."""

    def __init__(self, number: int, flat: torch.Tensor, place: int) -> None:
        self.number, self.place = number, place
        self.here: torch.Tensor | None = flat
        self.copied: Event | None = None
        self.elements, self.dtype, self.device = flat.numel(), flat.dtype, flat.device
        self.address = flat.data_ptr()  # where it was when it was parked


class _HostMemory:
    """Bytes one behind the other over chunks, in which a tensor may lie across borders."""

    def __init__(self, chunk_bytes: int, locked: bool) -> None:
        self._chunk_bytes, self._locked, self._used = chunk_bytes, locked, 0
        self._chunks: list[torch.Tensor] = []
        if locked:
            weakref.finalize(self, _unlock, self._chunks).atexit = False

    @property
    def size(self) -> int:
        return len(self._chunks) * self._chunk_bytes

    def start_over(self) -> None:
        self._used = 0

    def take(self, size: int) -> int:
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
    """Let the current stream wait for a copy."""
    if event is not None:
        event.wait(torch.cuda.current_stream())
