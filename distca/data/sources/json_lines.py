"""JSON Lines: one object per line, one of its fields is the document."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from distca.data.sources.source import BYTE_VOCABULARY, readable
from distca.errors import DataError
from distca.words import count

logger = logging.getLogger(__name__)


class JsonLines:
    """A byte-level source over .jsonl files. Opening it reads every file once to find offsets and lengths.

    The text of a line is escaped, so a token range cannot be found without decoding its line: ``read`` reads the line
    of that one document and keeps it for the next call. Convert large corpora with ``distca data convert``.

    Attributes:
        files: the .jsonl files, in order.
        lengths: [D] int64 bytes of each document's text in UTF-8. Empty texts are left out and counted in a log line.
        vocabulary: 256.
    """

    vocabulary = BYTE_VOCABULARY

    def __init__(self, path: str, field: str = "text") -> None:
        """Index the file ``path``, or every .jsonl file of the folder ``path`` in the order of their names.

        Args:
            path: the file or folder.
            field: of every line's object that is its document.

        Raises:
            DataError: on a missing path, a line that is not a JSON object with such a string, or no document at all.
        """
        self.files, self._field = lines_files(path), field
        lines: list[tuple[int, int, int, int, int]] = []
        empty = 0
        for index, file in enumerate(self.files):
            for number, offset, size, length in _index(file, field):
                if length:
                    lines.append((index, number, offset, size, length))
                else:
                    empty += 1
        if not lines:
            raise DataError(f"`path` {path!r} holds no document with text ({count(empty, 'line')} with an empty one).")
        if empty:
            logger.info("%s: left out %s", path, count(empty, "empty document"))
        columns = np.array(lines, dtype=np.int64).T
        self._file, self._line, self._offset, self._size, self.lengths = columns
        self._latest: tuple[int, bytes] = (-1, b"")

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """[stop - start] int64 UTF-8 bytes of one document's text.

        Raises:
            DataError: if the file changed since it was indexed, or cannot be read.
        """
        assert 0 <= start <= stop <= self.lengths[document]
        text = self._text(document)
        return np.frombuffer(text[start:stop], dtype=np.uint8).astype(np.int64)

    def where(self, document: int) -> str:
        """The file and the line of one document."""
        return f"{self.files[self._file[document]]}, line {self._line[document]}"

    def _text(self, document: int) -> bytes:
        held, text = self._latest
        if held == document:
            return text
        file = self.files[self._file[document]]
        with readable(), file.open("rb") as stream:
            stream.seek(int(self._offset[document]))
            line = stream.read(int(self._size[document]))
        try:
            text = _text_of(line, self._field)
        except ValueError:
            text = b""
        if len(text) != self.lengths[document]:
            raise DataError(f"{file} changed while it was in use; start again.")
        self._latest = (document, text)
        return text


def lines_files(path: str, packed: tuple[str, ...] = ()) -> list[Path]:
    """The file ``path``, or the .jsonl files of a folder in the order of their names. What else is in it is counted in
    a log line.

    Args:
        path: the file or folder.
        packed: suffixes of compressed files that are taken too: .jsonl and .json with one of them.

    Raises:
        DataError: there are none.
    """
    given = Path(path)
    if given.is_file():
        return [given]
    if not given.is_dir():
        raise DataError(f"`path` {path!r} does not exist.")
    suffixes = (".jsonl", *(f"{kind}{suffix}" for suffix in packed for kind in (".jsonl", ".json")))
    held = sorted(given.iterdir())
    files = [file for file in held if file.name.endswith(suffixes) and file.is_file()]
    if not files:
        raise DataError(f"The folder {path!r} holds no .jsonl file; set `path` to a file or a folder that has some.")
    folders = sum(each.is_dir() for each in held)
    left = ((len(held) - len(files) - folders, "file"), (folders, "folder"))
    if said := " and ".join(count(number, name) for number, name in left if number):
        _say_left_out(path, said)
    return files


@cache
def _say_left_out(path: str, left: str) -> None:
    """Once, as files are looked for several times."""
    logger.info("%s: left out %s; only files right in it with a suffix of JSON Lines are taken", path, left)


def _index(file: Path, field: str) -> Iterator[tuple[int, int, int, int]]:
    """(number of the line, offset, bytes of the line, bytes of the text) of every line that is not blank."""
    offset = 0
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                try:
                    yield number, offset, len(line), len(_text_of(line, field))
                except ValueError as error:
                    raise DataError(
                        f"{file}, line {number}: {error}; {remedy_of(error)}, or set `bad` to skip to leave such "
                        "documents out."
                    ) from None
            offset += len(line)


def _text_of(line: bytes, field: str) -> bytes:
    """The document of one line; ValueError says what is wrong with it."""
    value = record_of(line, field)[field]
    if not isinstance(value, str):
        raise ValueError(f'this is not a JSON object with a "{field}" string')
    return utf8_of(value, field)


def record_of(line: bytes, field: str) -> dict[str, Any]:
    """A line's object, which has a field; ValueError says what is wrong with it."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise NotJsonError(f"this is not valid JSON ({error})") from None
    except RecursionError:
        raise NotJsonError("this is JSON nested too deep to be read") from None
    if not isinstance(record, dict):
        raise ValueError(f'this is not a JSON object with a "{field}" string')
    if field not in record:
        said = f'this JSON object has no "{field}"; its fields are {", ".join(record) or "none"}'
        if field == "text" and any(isinstance(record.get(name), list) for name in ("messages", "conversations")):
            said += "; for conversations set `conversations` to true"
        raise ValueError(said)
    return record


class NotJsonError(ValueError):
    """A line that is not JSON, so no field of it can be named."""


def remedy_of(error: ValueError) -> str:
    """The remedy for an error of :func:`record_of`."""
    remedy = "correct or delete the line"
    return remedy if isinstance(error, NotJsonError) else f"{remedy}, name another `field`"


class NoTextError(ValueError):
    """A document that no tokenizer can take, whichever it is."""


def utf8_of(text: str, field: str) -> bytes:
    """A text in UTF-8; NoTextError where it has no such form."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise NoTextError(f'the "{field}" cannot be written as UTF-8 (it has an unpaired surrogate)') from None
