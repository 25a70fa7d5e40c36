"""Text files, one document each: a folder of them, or the Python files of this interpreter's standard library."""

from __future__ import annotations

import logging
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np

from distca.data.sources.source import BYTE_VOCABULARY, readable
from distca.errors import DataError
from distca.words import count

logger = logging.getLogger(__name__)

_SUFFIXES = (
    ".txt .text .md .rst .tex .org .html .htm .xml .csv .tsv .log"
    " .py .pyi .c .h .cc .cpp .hpp .cu .cuh .java .kt .scala .js .ts .go .rs .rb .php .swift .cs .lua .jl .r .sh .sql"
    " .yaml .yml .toml .ini .cfg"
)
TEXT_SUFFIXES = frozenset(_SUFFIXES.split())


def open_text_folder(path: str) -> FileBytes:
    """The text files below ``path``, as bytes, in the order of their relative path.

    A text file is one whose name ends, in either case, in one of TEXT_SUFFIXES. Hidden files and folders (names that
    begin with a dot) and links are left out. If ``path`` is a file it is the only document.

    Raises:
        DataError: if ``path`` does not exist, holds no text file with content, or is a file that another source reads.
    """
    folder = Path(path)
    if folder.is_file():
        if other := _source_of([folder]):
            raise DataError(
                f"`path` {path!r} would be one document with `source` text; set `source` to {other}, which reads the "
                "documents inside it."
            )
        return FileBytes([folder], str(folder))
    if not folder.is_dir():
        raise DataError(f"`path` {path!r} does not exist.")
    files = list(walk(folder, lambda name: name.startswith(".")))
    texts = [file for file in files if file.suffix.lower() in TEXT_SUFFIXES and not file.name.startswith(".")]
    if not texts:
        other = _source_of(files)
        instead = f"`source` to {other}" if other else "`path` to another folder"
        raise DataError(
            f"The folder {path!r} holds no text file: none of its {len(files)} files has a known text suffix such as "
            f".txt, .md or .py; set {instead}."
        )
    if len(texts) < len(files):
        left = count(len(files) - len(texts), "file")
        logger.info("%s: left out %s, hidden or without a text suffix", path, left)
    return FileBytes(texts, f"The folder {path!r}")


def _source_of(files: list[Path]) -> str | None:
    """The source that reads such files, by their names, where that is not text."""
    for source, suffixes in (("jsonl", (".jsonl", ".jsonl.gz", ".jsonl.zst")), ("parquet", (".parquet",))):
        if any(file.name.endswith(suffixes) for file in files):
            return source
    return None


_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}


def open_stdlib(path: str | None = None) -> FileBytes:
    """The .py files of the running interpreter's standard library, as bytes, in the order of their relative path.

    Installed packages are left out. The documents are the same wherever the same Python build runs; another version or
    distribution of Python has other files.

    Raises:
        DataError: if this interpreter comes without source files, or a ``path`` is given, which it does not take.
    """
    if path is not None:
        raise DataError(
            f"The document source 'stdlib' reads the running Python's own source files and takes no path, but "
            f"`path` is {path!r}; set `source` to {_source_of([Path(path)]) or 'text'}."
        )
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in walk(folder, _NOT_STDLIB.__contains__) if file.suffix == ".py"]
    if not files:
        raise DataError(
            f"This Python comes without the source of its standard library ({folder} has no .py files); "
            "set `source` to text and `path` to a folder of text files."
        )
    return FileBytes(files, f"The standard library ({folder})")


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
            raise DataError(f"{where} holds no document: it has no text at all ({count(len(files), 'empty file')}).")
        if len(kept) < len(files):
            logger.info("%s: left out %s", where, count(len(files) - len(kept), "empty file"))
        self.files = [files[index] for index in kept]
        self.lengths = sizes[kept]

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """[stop - start] int64 bytes of one file; nothing else of it is read.

        Raises:
            DataError: if the file became shorter since it was listed, or cannot be read.
        """
        assert 0 <= start <= stop <= self.lengths[document]
        with readable(), self.files[document].open("rb", buffering=0) as file:
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


def _refuse(error: OSError) -> NoReturn:
    raise error


def walk(folder: Path, skip_folder: Callable[[str], bool]) -> Iterator[Path]:
    """Regular files below ``folder``, without following links, in the order of their relative path; OSError where a
    folder cannot be read, whose files would be missing."""
    found: list[str] = []  # to sort them as a Path each would take most of the time
    for parent, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not skip_folder(name)]
        found += [os.path.join(parent, name) for name in names]
    found.sort()  # they begin alike
    return (Path(file) for file in found if os.path.isfile(file) and not os.path.islink(file))
