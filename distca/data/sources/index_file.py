"""Megatron's .idx files: which sequences a .bin file of token ids holds, and which of them make up a document."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distca.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
# Magic, version, number type, how many sequences, how many borders.
_HEADER = struct.Struct("<9sQBQQ")
# By code of the format; 6 and 7 are floating-point types.
_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


@dataclass(frozen=True)
class Index:
    """The content of an .idx file.

    Attributes:
        dtype: of the token ids.
        lengths: [S] int32 tokens of each sequence.
        offsets: [S] int64 byte of the .bin file that each sequence starts at.
        borders: [D + 1] int64: document d consists of sequences [borders[d], borders[d + 1]).
    """

    dtype: np.dtype
    lengths: np.ndarray
    offsets: np.ndarray
    borders: np.ndarray

    @staticmethod
    def of_documents(lengths: list[int], dtype: type[np.integer]) -> Index:
        """The index of documents of one sequence each, one after the other in the .bin file."""
        ends = np.cumsum([0, *lengths], dtype=np.int64)
        offsets = ends[:-1] * np.dtype(dtype).itemsize
        return Index(np.dtype(dtype), np.array(lengths, np.int32), offsets, np.arange(len(lengths) + 1))

    @property
    def bytes(self) -> int:
        """How long the .bin file is; Megatron's writer leaves nothing between or behind sequences."""
        return int((self.offsets + self.lengths.astype(np.int64) * self.dtype.itemsize).max(initial=0))

    def write(self, path: Path) -> None:
        """Write the file; OSError where that fails."""
        (code,) = (code for code, known in _TYPES.items() if known == self.dtype)
        header = _HEADER.pack(_MAGIC, _VERSION, code, len(self.lengths), len(self.borders))
        arrays = (self.lengths.astype("<i4"), self.offsets.astype("<i8"), self.borders.astype("<i8"))
        path.write_bytes(header + b"".join(array.tobytes() for array in arrays))


def read_index(path: Path) -> Index:
    """Map an .idx file into memory.

    Raises:
        DataError: it is of another format, cut off, or contradicts itself.
    """
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise DataError(f"{path} is not an index of Megatron's .bin/.idx format.")
    _, version, code, sequences, borders = _HEADER.unpack(header)
    if version != _VERSION:
        raise DataError(f"{path} has format version {version}; only version {_VERSION} can be read.")
    if code not in _TYPES:
        raise DataError(f"{path} names number type {code}, which is no integer type, so its .bin holds no token ids.")
    if path.stat().st_size < _HEADER.size + 12 * sequences + 8 * borders:
        raise DataError(
            f"{path} is cut off: it announces {sequences} sequences but ends before; copy or convert again."
        )
    mapped = np.memmap(path, np.uint8, mode="r")[_HEADER.size :]
    lengths, offsets, numbers = np.split(mapped[: 12 * sequences + 8 * borders], [4 * sequences, 12 * sequences])
    index = Index(np.dtype(_TYPES[code]), lengths.view("<i4"), offsets.view("<i8"), numbers.view("<i8"))
    _check(path, index)
    return index


def _check(path: Path, index: Index) -> None:
    if len(index.borders) == 0 or index.borders[-1] != len(index.lengths):
        raise DataError(f"{path} cannot be read: its counts contradict each other.")
    if index.borders[0] < 0 or np.diff(index.borders).min(initial=0) < 0:
        raise DataError(f"{path} cannot be read: its documents are not in order.")
    if min(index.lengths.min(initial=0), index.offsets.min(initial=0)) < 0:
        raise DataError(f"{path} cannot be read: it holds negative lengths or offsets.")
