"""Documents that are files, one each, whose bytes are the tokens."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from distca.data.sources.source import BYTE_VOCABULARY
from distca.errors import DataError

logger = logging.getLogger(__name__)


class FileBytes:
    """A byte-level source over files; empty files are left out and counted in a log line.

    Attributes:
        files: one path per document.
        lengths: [D] int64 file sizes in bytes.
        vocabulary: 256.
    """

    vocabulary = BYTE_VOCABULARY

    def __init__(self, files: list[Path], where: str) -> None:
        """Take the files in the order given; ``where`` names the source in messages."""
        sizes = np.array([file.stat().st_size for file in files], dtype=np.int64)
        kept = np.flatnonzero(sizes > 0)
        if len(kept) == 0:
            raise DataError(f"{where} holds no document: {len(files)} files were found and all of them are empty.")
        if len(kept) < len(files):
            logger.info("%s: left out %d empty files", where, len(files) - len(kept))
        self.files = [files[index] for index in kept]
        self.lengths = sizes[kept]

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """[stop - start] int64 bytes of one file; nothing else of it is read.

        Raises:
            DataError: if the file became shorter since it was listed.
        """
        assert 0 <= start <= stop <= self.lengths[document]
        with self.files[document].open("rb", buffering=0) as file:
            file.seek(start)
            content = _read_fully(file.read, stop - start)
        if len(content) < stop - start:
            raise DataError(f"{self.files[document]} became shorter while it was in use; start again.")
        return np.frombuffer(content, dtype=np.uint8).astype(np.int64)

    def where(self, document: int) -> str:
        """The file of one document."""
        return str(self.files[document])


def _read_fully(read: Callable[[int], bytes | None], size: int) -> bytes:
    """Read ``size`` bytes, or less at the end of the file; one unbuffered read may return fewer than asked for."""
    parts: list[bytes] = []
    while size > 0 and (part := read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def walk(folder: Path, skip_folder: Callable[[str], bool]) -> Iterator[Path]:
    """Regular files below ``folder``, without following links, in the order of their relative path."""
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not skip_folder(name)]
        found += [Path(parent, name) for name in names]
    found.sort(key=lambda file: file.relative_to(folder).as_posix())
    return (file for file in found if file.is_file() and not file.is_symlink())
