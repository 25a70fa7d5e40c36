"""The CUDA library of csrc/, loaded through ctypes: copy engines, signals in memory, and two kernels over rows.

It is optional. Everything here queues work on a stream and returns; nothing blocks the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np
import torch

_SUM_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class NativeError(RuntimeError):
    """A CUDA call of the library failed."""


_INTERFACE = 1  # of csrc/row_moves.cu


@cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or why there is none."""
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
            "distca_put_rows": [pointer, pointer, pointer, number, number, pointer],
            "distca_signal": [pointer, number, ctypes.c_uint64, pointer],
            "distca_await": [pointer, number, ctypes.c_uint64, pointer],
            "distca_push_rows": [pointer] * 3 + [number] * 2 + [pointer, ctypes.c_uint64] * 2 + [pointer] * 2,
            "distca_move_rows": [pointer, pointer, pointer, pointer, number, number, pointer],
            "distca_sum_rows": [pointer, pointer, pointer, pointer, pointer, number, number, ctypes.c_int, pointer],
        }
        for name, arguments in signatures.items():
            getattr(library, name).argtypes = arguments
        library.distca_error_name.restype = ctypes.c_char_p
    return library


@cache
def why_not() -> str | None:
    """Why the library cannot be used, or None. Where there is a GPU it is tried once: a library that loads may still
    hold no code for this GPU, or need a newer driver."""
    library, reason = _library(), _load()[1]
    if library is None or not torch.cuda.is_available():
        return reason
    source = torch.arange(64, dtype=torch.int32, device="cuda").view(4, 16)
    destination = torch.zeros_like(source)
    try:
        move_rows(source, None, destination, None, len(source))
        works = torch.equal(source, destination)
    except (NativeError, RuntimeError) as error:
        return f"the CUDA library of csrc/ does not run here: {error}"
    return None if works else "the CUDA library of csrc/ does not run right on this GPU"


def is_available() -> bool:
    """Whether the library can be used here; see :func:`why_not`."""
    return why_not() is None


def row_bytes(rows: torch.Tensor) -> int:
    """Bytes of one row of a tensor."""
    return rows.shape[1:].numel() * rows.element_size()


def put_rows(source: int, destination: int, ranges: np.ndarray, row_bytes: int, stream: torch.cuda.Stream) -> None:
    """Copy row ranges by copy engine.

    Args:
        source: address of the first source row.
        destination: address of the first destination row, on this GPU or a peer's.
        ranges: [N, 3] int64, contiguous: source row, destination row, rows.
        row_bytes: bytes of a row.
        stream: where to queue it.
    """
    _call("distca_put_rows", source, destination, ranges.ctypes.data, len(ranges), row_bytes, stream.cuda_stream)


def push_rows(
    source: torch.Tensor,
    source_rows: torch.Tensor,
    destination: int,
    room: tuple[int, int],
    arrived: tuple[int | None, int],
    finished_blocks: torch.Tensor,
    stream: torch.cuda.Stream,
) -> None:
    """Write rows by a small kernel that also waits for room and signals.

    Args:
        source: contiguous tensor.
        source_rows: [N] int64 its rows to write, N at least 1.
        destination: address on a peer at which they follow each other.
        room: (address, value): nothing is written before this word of this GPU is at least the value.
        arrived: (address, value): the peer's word that gets the value afterwards; address None signals nothing.
        finished_blocks: int32 zero, used by one stream only.
        stream: where to queue it.
    """
    rows = (source.data_ptr(), source_rows.data_ptr(), destination, len(source_rows), row_bytes(source))
    _call("distca_push_rows", *rows, *room, *arrived, finished_blocks.data_ptr(), stream.cuda_stream)


def signal(addresses: np.ndarray, value: int, stream: torch.cuda.Stream) -> None:
    """Write ``value`` to the words at ``addresses`` ([N] uint64) once all earlier work of the stream can be seen."""
    _call("distca_signal", addresses.ctypes.data, len(addresses), value, stream.cuda_stream)


def wait_for(addresses: np.ndarray, value: int, stream: torch.cuda.Stream) -> None:
    """Hold the stream until every word at ``addresses`` ([N] uint64) of this GPU is at least ``value``."""
    _call("distca_await", addresses.ctypes.data, len(addresses), value, stream.cuda_stream)


def move_rows(
    source: torch.Tensor,
    source_rows: torch.Tensor | None,
    destination: torch.Tensor,
    destination_rows: torch.Tensor | None,
    rows: int,
) -> None:
    """destination[destination_rows[i]] = source[source_rows[i]] for i < rows; None means row i itself.

    Both tensors are contiguous, of equal dtype and trailing shape; indices are [rows] int64 on the same device.
    """
    arguments = (source.data_ptr(), _address(source_rows), destination.data_ptr(), _address(destination_rows))
    _call("distca_move_rows", *arguments, rows, row_bytes(source), torch.cuda.current_stream().cuda_stream)


def can_sum(rows: torch.Tensor) -> bool:
    """Whether :func:`sum_rows` knows the dtype and row width of ``rows``."""
    return rows.dtype in _SUM_KINDS and row_bytes(rows) % 16 == 0


def sum_rows(
    packed: torch.Tensor,
    copies: torch.Tensor,
    borders: torch.Tensor,
    destination: torch.Tensor,
    destination_rows: torch.Tensor,
) -> None:
    """Add packed[copies[borders[i]:borders[i+1]]] to destination[destination_rows[i]]: in float32, in this order,
    rounded once. Indices are int64 on the device."""
    width = packed.shape[1:].numel()
    tensors = (packed, copies, borders, destination_rows, destination)
    addresses = (tensor.data_ptr() for tensor in tensors)
    stream = torch.cuda.current_stream().cuda_stream
    _call("distca_sum_rows", *addresses, len(destination_rows), width, _SUM_KINDS[packed.dtype], stream)


def addresses_of(base: int, words: Sequence[int]) -> np.ndarray:
    """[N] uint64 addresses of the 64-bit words with these numbers in the memory at ``base``."""
    return base + 8 * np.asarray(words, np.uint64)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _call(name: str, *arguments: int | None) -> None:
    library = _library()
    assert library is not None, "the CUDA library is not there"
    code = getattr(library, name)(*arguments)
    if code:
        raise NativeError(f"{name} failed: {library.distca_error_name(code).decode()} (CUDA error {code}).")
