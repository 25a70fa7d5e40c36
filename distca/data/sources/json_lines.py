"""JSON lines: one object per line, its "text" field is the document."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from distca.data.sources.source import BYTE_VOCABULARY
from distca.errors import DataError

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

    def __init__(self, path: str) -> None:
        """Index the file ``path``, or every .jsonl file of the folder ``path`` in the order of their names.

        Raises:
            DataError: on a missing path, a line that is not a JSON object with a "text" string, or no document at all.
        """
        self.files = _files(path)
        lines: list[tuple[int, int, int, int, int]] = []
        empty = 0
        for index, file in enumerate(self.files):
            for number, offset, size, length in _index(file):
                if length:
                    lines.append((index, number, offset, size, length))
                else:
                    empty += 1
        if not lines:
            raise DataError(f"`path` {path!r} holds no document with text ({empty} lines have an empty text).")
        if empty:
            logger.info("%s: left out %d empty documents", path, empty)
        columns = np.array(lines, dtype=np.int64).T
        self._file, self._line, self._offset, self._size, self.lengths = columns
        self._latest: tuple[int, bytes] = (-1, b"")

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """[stop - start] int64 UTF-8 bytes of one document's text.

        Raises:
            DataError: if the file changed since it was indexed.
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
        with file.open("rb") as stream:
            stream.seek(int(self._offset[document]))
            line = stream.read(int(self._size[document]))
        try:
            text = _text_of(line)
        except ValueError:
            text = b""
        if len(text) != self.lengths[document]:
            raise DataError(f"{file} changed while it was in use; start again.")
        self._latest = (document, text)
        return text


def _files(path: str) -> list[Path]:
    given = Path(path)
    if given.is_file():
        return [given]
    if not given.is_dir():
        raise DataError(f"`path` {path!r} does not exist.")
    files = sorted(given.glob("*.jsonl"))
    if not files:
        raise DataError(f"The folder {path!r} holds no .jsonl file; set `path` to a file or a folder that has some.")
    return files


def _index(file: Path) -> Iterator[tuple[int, int, int, int]]:
    """(number of the line, offset, bytes of the line, bytes of the text) of every line that is not blank."""
    offset = 0
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                try:
                    yield number, offset, len(line), len(_text_of(line))
                except ValueError as error:
                    raise DataError(f"{file}, line {number}: {error}; correct or delete the line.") from None
            offset += len(line)


def _text_of(line: bytes) -> bytes:
    """The document of one line; ValueError says what is wrong with it."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"this is not valid JSON ({error})") from None
    except RecursionError:
        raise ValueError("this is JSON nested too deep to be read") from None
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise ValueError('this is not a JSON object with a "text" string')
    try:
        return str(record["text"]).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError('the "text" cannot be written as UTF-8 (it has an unpaired surrogate)') from None
