"""Blocks of JSON Lines files, also of those packed with gzip or Zstandard."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from distca.data.sources.source import readable
from distca.data.texts.blocks import BLOCK_BYTES, LinesBlock
from distca.errors import DataError, VersionError, system_words
from distca.json_file import open_regular

PACKED = (".gz", ".zst")


def line_blocks(file: Path) -> Iterator[LinesBlock]:
    """All lines of a file, in order.

    Raises:
        DataError: it cannot be read, or is cut off or damaged.
        VersionError: its compression needs a package that is missing.
    """
    first, read_before, rest = 1, 0, b""
    with readable():
        opened = open_regular(file)
    with opened as raw:
        for part in _checked(file, raw):
            end = part.rfind(b"\n") + 1
            if not end:
                rest += part
                continue
            content, rest = rest + part[:end], part[end:]
            read = raw.tell()
            yield LinesBlock(str(file), first, content, read - read_before)
            first, read_before = first + content.count(b"\n"), read
        if rest or raw.tell() > read_before:
            yield LinesBlock(str(file), first, rest, raw.tell() - read_before)


def _checked(file: Path, raw: IO[bytes]) -> Iterator[bytes]:
    try:
        yield from _parts(file, raw)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(file, error) from None
    except OSError as error:
        raise DataError(f"{file} cannot be read ({system_words(error)}); make it readable or remove it.") from None


def _parts(file: Path, raw: IO[bytes]) -> Iterator[bytes]:
    """Its content, unpacked, in parts of a few megabytes."""
    if file.suffix == ".zst":
        yield from _unpacked(file, raw)
        return
    stream = cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if file.suffix == ".gz" else raw
    while part := stream.read(BLOCK_BYTES):
        yield part


def _unpacked(file: Path, raw: IO[bytes]) -> Iterator[bytes]:
    """Frame after frame: the package's own readers take the end of a file for the end of a frame."""
    try:
        import zstandard
    except ImportError:
        raise VersionError(f"{file} needs the package zstandard: pip install 'distca[data]'.") from None
    frame: Any = None
    try:
        while packed := raw.read(BLOCK_BYTES // 4):
            while packed:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(packed)
                packed, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    except zstandard.ZstdError as error:
        raise _damaged(file, error) from None
    if frame is not None:
        raise _damaged(file, EOFError("it ends in the middle"))


def _damaged(file: Path, error: Exception) -> DataError:
    return DataError(f"{file} is cut off or damaged ({error}); copy or pack it again.")
