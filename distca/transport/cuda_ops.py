"""The CUDA library of ``csrc/``, called through ctypes: copies by copy engine, signals between GPUs, kernels for rows.

A *slot* is a 64-bit word of memory. To *signal*, a GPU writes a number to a slot, and a stream of another GPU waits for
that number. Copies, signals, waits and kernels are queued on a stream, and the host does not wait for them. The library
is optional: :func:`why_not` tells whether it can be used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np
import torch

from distca.device.event import Event

_SUM_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The dtypes that ``distca_sum_rows`` adds, with the library's number of each."""


class NativeError(RuntimeError):
    """A CUDA call of the library failed."""


_INTERFACE = 2
"""The version of the C functions in csrc/row_moves.cu. A library of another version is not used."""


@cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    path = Path(__file__).parent / f"_rows{EXTENSION_SUFFIXES[0]}"
    if not path.is_file():
        return (
            None,
            "the CUDA library of csrc/ was not built: nvcc was missing or failed (`pip install -v .` says which)",
        )
    try:
        library = ctypes.CDLL(str(path))
        if library.distca_interface() != _INTERFACE:
            raise AttributeError
    except OSError as error:
        return None, f"the CUDA library of csrc/ does not load: {error}"
    except AttributeError:
        return None, "the CUDA library of csrc/ was built from other sources; install again"
    return library, None


@cache
def _library() -> ctypes.CDLL | None:
    library, _ = _load()
    if library is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        signatures = {
            "distca_copy_rows": [pointer, number, ctypes.c_int, pointer],
            "distca_signal": [pointer, number, ctypes.c_uint64, pointer],
            "distca_await": [pointer, number, ctypes.c_uint64, pointer],
            "distca_push_rows": [pointer, number] * 2 + [ctypes.c_uint64, pointer, ctypes.c_int, pointer],
            "distca_create_stream": [ctypes.c_int, pointer],
            "distca_move_rows": [pointer, pointer, pointer, pointer, number, number, pointer],
            "distca_sum_rows": [pointer, pointer, pointer, pointer, pointer, number, number, ctypes.c_int, pointer],
        }
        for name, arguments in signatures.items():
            getattr(library, name).argtypes = arguments
        library.distca_error_name.restype = ctypes.c_char_p
    return library


@cache
def why_not() -> str | None:
    """Returns the reason why the library cannot be used, or None."""
    library, reason = _library(), _load()[1]
    if library is None:
        return reason
    if not torch.cuda.is_available():
        return "torch finds no GPU here"
    source = torch.arange(64, dtype=torch.int32, device="cuda").view(4, 16)
    destination = torch.zeros_like(source)
    try:
        move_rows(source, None, destination, None, len(source))
        works = torch.equal(source, destination)
    except (NativeError, RuntimeError) as error:
        return f"the CUDA library of csrc/ does not run here: {error}"
    return None if works else "the CUDA library of csrc/ moves rows wrongly on this GPU"


def is_available() -> bool:
    return why_not() is None


def row_bytes(rows: torch.Tensor) -> int:
    """Returns the bytes of one row; the tensor's first dimension counts rows."""
    return rows.shape[1:].numel() * rows.element_size()


@cache
def why_no_signals() -> str | None:
    """Returns the reason why streams of the current GPU cannot write signals and wait for them, or None."""
    if why_not() is not None:
        return why_not()
    library = _library()
    assert library is not None
    if not library.distca_can_signal():
        return "streams of this GPU, under this driver, cannot write and wait for 64-bit words in memory"
    return None


def create_stream(priority: int) -> torch.cuda.Stream:
    """Returns a new stream of the current GPU. The stream is never destroyed.

    ``torch.cuda.Stream()`` may return a stream that other code uses too. That code's work would then be queued behind
    waits for other ranks.

    Args:
        priority: 0 is usual; work of streams with a lower number starts first.
    """
    handle = ctypes.c_void_p()
    _call("distca_create_stream", priority, ctypes.addressof(handle))
    return torch.cuda.ExternalStream(handle.value)


def current_stream() -> torch.cuda.Stream:
    return torch.cuda.current_stream()


def mark(stream: torch.cuda.Stream) -> Event:
    """Records an event behind the stream's earlier work, and returns the event."""
    event = Event()
    event.record(stream)
    return event


def copy_rows(pieces: Sequence[tuple[int, int, np.ndarray, int]], batched: bool, stream: torch.cuda.Stream) -> None:
    """Queues copies of row ranges.

    Args:
        pieces: for each tensor (address of its first row, address of the destination's first row, ranges, bytes of a
            row). The destination may be on any GPU. Ranges are a contiguous [N, 3] int64 array: first source row, first
            destination row, number of rows.
        batched: whether one CUDA call copies all ranges, in any order. Otherwise, and before CUDA 13, each range is
            copied by a call of its own, one after the other. Such a call runs as a kernel if it copies inside one GPU.
    """
    table = [(source, to, ranges.ctypes.data, len(ranges), width) for source, to, ranges, width in pieces]
    packed = np.array(table, np.int64)
    _call("distca_copy_rows", packed.ctypes.data, len(table), batched, stream.cuda_stream)


def push_rows(
    pieces: Sequence[tuple[torch.Tensor, torch.Tensor, int]],
    arrived: np.ndarray,
    number: int,
    finished_blocks: torch.Tensor,
    most_blocks: int,
    stream: torch.cuda.Stream,
) -> None:
    """Queues a kernel that writes rows to addresses and then signals.

    Args:
        pieces: for each piece (contiguous tensor, [N] int64 numbers of its rows to write, address on any GPU). The rows
            are written one behind the other, from this address on.
        arrived: uint64 addresses of slots to which ``number`` is signalled; empty for no signal.
        finished_blocks: [1] int32, a counter for the kernel, zero before and after. Two streams must not share it.
        most_blocks: the most thread blocks, of 256 threads each, that the kernel has.
    """
    table = [(rows.data_ptr(), index.data_ptr(), to, len(index), row_bytes(rows)) for rows, index, to in pieces]
    packed = np.array(table, np.int64)
    arguments = (packed.ctypes.data, len(table), arrived.ctypes.data, len(arrived), number)
    _call("distca_push_rows", *arguments, finished_blocks.data_ptr(), most_blocks, stream.cuda_stream)


def signal(addresses: np.ndarray, value: int, stream: torch.cuda.Stream) -> None:
    """Writes ``value`` to the slots at ``addresses``, [N] uint64, on any GPU, after the stream's earlier work."""
    _call("distca_signal", addresses.ctypes.data, len(addresses), value, stream.cuda_stream)


def wait_for(addresses: np.ndarray, value: int, stream: torch.cuda.Stream) -> None:
    """Makes the stream wait until each slot at ``addresses``, [N] uint64 on this GPU, has at least ``value``."""
    _call("distca_await", addresses.ctypes.data, len(addresses), value, stream.cuda_stream)


def move_rows(
    source: torch.Tensor,
    source_rows: torch.Tensor | None,
    destination: torch.Tensor,
    destination_rows: torch.Tensor | None,
    rows: int,
) -> None:
    """Sets destination[destination_rows[i]] = source[source_rows[i]] for i < rows.

    Source and destination are contiguous, with equal dtype and bytes per row. Index tensors are [rows] int64 on the
    same device; None stands for 0, 1, 2 and so on."""
    arguments = (source.data_ptr(), _address(source_rows), destination.data_ptr(), _address(destination_rows))
    _call("distca_move_rows", *arguments, rows, row_bytes(source), torch.cuda.current_stream().cuda_stream)


def can_sum(rows: torch.Tensor) -> bool:
    """Whether :func:`sum_rows` can add ``rows``: 16-bit floats or float32, and a multiple of 16 bytes in a row."""
    return rows.dtype in _SUM_KINDS and row_bytes(rows) % 16 == 0


def sum_rows(
    packed: torch.Tensor,
    copies: torch.Tensor,
    borders: torch.Tensor,
    destination: torch.Tensor,
    destination_rows: torch.Tensor,
) -> None:
    """Adds the rows packed[copies[borders[i]:borders[i+1]]] to the row destination[destination_rows[i]], for each i.

    Rows are added in float32, in the order of ``copies``, and each sum is rounded once. ``copies``, ``borders`` and
    ``destination_rows`` are int64 on the same device."""
    width = packed.shape[1:].numel()
    tensors = (packed, copies, borders, destination_rows, destination)
    addresses = (tensor.data_ptr() for tensor in tensors)
    stream = torch.cuda.current_stream().cuda_stream
    _call("distca_sum_rows", *addresses, len(destination_rows), width, _SUM_KINDS[packed.dtype], stream)


def addresses_of(base: int, slots: Sequence[int]) -> np.ndarray:
    """Returns [N] uint64, the addresses of slots with the numbers ``slots``; slot 0 lies at ``base``."""
    return base + 8 * np.asarray(slots, np.uint64)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _call(name: str, *arguments: int | None) -> None:
    library = _library()
    assert library is not None, "the CUDA library is not there"
    code = getattr(library, name)(*arguments)
    if code:
        raise NativeError(f"{name} failed: {library.distca_error_name(code).decode()} (CUDA error {code}).")
