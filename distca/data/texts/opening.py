"""One door to all texts: which files there are, what identifies them, and their blocks."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from distca.data.sources.json_lines import lines_files
from distca.data.sources.source import readable
from distca.data.sources.text import open_stdlib, open_text_folder, walk
from distca.data.texts.blocks import BLOCK_BYTES, Block, FilesBlock
from distca.data.texts.lines import PACKED, line_blocks
from distca.data.texts.tables import saved_files, table_blocks
from distca.errors import DataError, system_words
from distca.json_file import open_regular
from distca.words import count

logger = logging.getLogger(__name__)

TextKind = Literal["stdlib", "text", "jsonl", "parquet", "arrow"]
TEXT_KINDS: tuple[str, ...] = get_args(TextKind)


@dataclass(frozen=True)
class Texts:
    """Files of text.

    Attributes:
        kind: what they are.
        files: in the order of their documents.
    """

    kind: str
    files: tuple[Path, ...]

    @property
    def bytes(self) -> int:
        """The size of all files as they lie on disk."""
        return sum(size for _, size, _ in self.state())

    @property
    def packed(self) -> bool:
        """Whether some of them are compressed, so that no part can be read by itself."""
        return self.kind == "jsonl" and any(file.suffix in PACKED for file in self.files)

    def blocks(self, field: str, beside: Sequence[str] = ()) -> Iterator[Block]:
        """All documents, in blocks that are the same every time; DataError where a file cannot be read. Of tables only
        the column ``field`` is read, and columns ``beside`` it."""
        if self.kind in ("stdlib", "text"):
            yield from _file_blocks(self.files)
            return
        for file in self.files:
            yield from line_blocks(file) if self.kind == "jsonl" else table_blocks(self.kind, file, field, beside)

    def state(self) -> list[tuple[str, int, int]]:
        """(path, size, time of change) of every file: what is quickly seen to be as it was;
        DataError where one is gone."""
        return [_state_of(file) for file in self.files]

    def digest(self) -> str:
        """Returns a digest of the content, wherever it lies; it reads all of it.

        Raises:
            DataError: a file cannot be read.
        """
        whole = hashlib.sha256(self.kind.encode())
        for file in self.files:
            try:
                with open_regular(file) as stream:
                    whole.update(hashlib.file_digest(stream, "blake2b").digest())
            except OSError as error:
                raise _unreadable(file, error) from None
        return whole.hexdigest()


@readable()
def open_texts(kind: str, path: str | None) -> Texts:
    """Find the files of a text.

    Args:
        kind: ``stdlib``: the running Python's own source files; ``text``: a folder of text files; ``jsonl``: JSON
            Lines, also .gz and .zst; ``parquet``; or ``arrow``: a folder that the library ``datasets`` saved to disk.
        path: the file or folder; ``stdlib`` takes none.

    Raises:
        DataError: there are none.
    """
    if kind == "stdlib":
        return Texts(kind, tuple(open_stdlib(path).files))
    if not path:
        raise DataError(f"The document source {kind!r} needs a path; set `path`.")
    if kind == "text":
        return Texts(kind, tuple(open_text_folder(path).files))
    given = Path(path)
    if not given.exists():
        raise DataError(f"`path` {path!r} does not exist.")
    if kind == "jsonl":
        return Texts(kind, tuple(lines_files(path, PACKED)))
    files = [given] if given.is_file() else _parquet_files(given) if kind == "parquet" else []
    files = files or (saved_files(given) if kind == "arrow" else [])
    if not files:
        raise DataError(f"The folder {path!r} holds no .parquet file; set `path` to a file or a folder that has some.")
    return Texts(kind, tuple(files))


def _parquet_files(folder: Path) -> list[Path]:
    # The walk says what cannot be read, which glob passes over; it passes over links.
    if left := sum(file.suffix != ".parquet" for file in walk(folder, lambda name: False)):
        _say_left_out(folder, count(left, "file"))
    # Spark writes a table as a folder with the suffix, whose files are found below it.
    return sorted(file for file in folder.glob("**/*.parquet") if not file.is_dir())


@cache
def _say_left_out(folder: Path, left: str) -> None:
    """Once, as files are looked for several times."""
    logger.info("%s: left out %s; only .parquet files are taken", folder, left)


def _state_of(file: Path) -> tuple[str, int, int]:
    try:
        stat = file.stat()
    except OSError as error:
        raise _unreadable(file, error) from None
    return str(file.absolute()), stat.st_size, stat.st_mtime_ns


def _file_blocks(files: tuple[Path, ...]) -> Iterator[FilesBlock]:
    names: list[str] = []
    contents: list[bytes] = []
    size = 0
    for file in files:
        try:
            contents.append(_content(file))
        except OSError as error:
            raise _unreadable(file, error) from None
        names.append(str(file))
        size += len(contents[-1])
        if size >= BLOCK_BYTES:
            yield FilesBlock(names, contents, size)
            names, contents, size = [], [], 0
    if names:
        yield FilesBlock(names, contents, size)


def _content(file: Path) -> bytes:
    with open_regular(file) as opened:
        return opened.read()


def _unreadable(file: Path, error: OSError) -> DataError:
    return DataError(f"{file} cannot be read ({system_words(error)}); make it readable or remove it.")
