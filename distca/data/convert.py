"""Conversion: a byte-level source to Megatron's .bin/.idx, tokenized, with a sidecar that names the vocabulary."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from distca.data.sources.index_file import Index
from distca.data.sources.indexed import sidecar, without_suffix
from distca.data.sources.source import DocumentSource
from distca.data.tokenizer import Tokenizer
from distca.errors import DataError, system_words

_BATCH_BYTES = 1 << 22


@dataclass(frozen=True)
class Converted:
    """What a conversion wrote, as recorded in the sidecar PREFIX.json.

    Attributes:
        tokenizer: ``bytes`` or the file of the tokenizer.
        vocabulary: token ids are in [0, vocabulary).
        documents: documents written.
        tokens: tokens written.
        empty: documents that the tokenizer turned into no token, which were left out.
    """

    tokenizer: str
    vocabulary: int
    documents: int
    tokens: int
    empty: int


def convert(
    source: DocumentSource,
    tokenizer: Tokenizer,
    tokenizer_name: str,
    output: str,
    advanced: Callable[[int], None] = lambda _: None,
) -> Converted:
    """Tokenize every document of a byte-level source into OUTPUT.bin and OUTPUT.idx.

    The files are written into a folder beside them and moved from there once all are whole, so a conversion that fails
    leaves none of them, and one that is killed leaves no more than that folder.

    Args:
        source: a source whose tokens are bytes of text.
        tokenizer: turns each document into ids.
        tokenizer_name: recorded in the sidecar.
        output: path of the files, without suffix; .bin or .idx at its end is taken off.
        advanced: called with the number of bytes done since the last call.

    Raises:
        DataError: if an output file exists or cannot be written, a document cannot be read or tokenized, or no token
            comes out.
    """
    prefix = check_output(output)
    try:
        with _folder_beside(prefix) as folder:
            partial = str(Path(folder, Path(prefix).name))
            done = _write(source, tokenizer, tokenizer_name, partial, advanced)
            _refuse_existing(prefix)
            for made, file in zip(_files(partial), _files(prefix), strict=True):
                made.rename(file)
    except OSError as error:
        raise _unwritable(prefix, error) from None
    return done


def check_output(output: str) -> str:
    """The path of the files that ``output`` names, without suffix, once it is clear that they can be written.

    The folder they go to is made where it is missing.

    Raises:
        DataError: if ``output`` names no file, a file of that name exists, or the folder cannot be written to.
    """
    prefix = without_suffix(output)
    if os.path.basename(prefix) in ("", ".", ".."):
        raise DataError(f"The output {output!r} names no file; give the path of the files to write, without suffix.")
    try:
        _refuse_existing(prefix)
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        with _folder_beside(prefix):
            pass
    except OSError as error:
        raise _unwritable(prefix, error) from None
    return prefix


def _files(prefix: str) -> tuple[Path, Path, Path]:
    """The files of a corpus; the index is last, as nothing opens the others without it."""
    return sidecar(prefix), Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def _folder_beside(prefix: str) -> TemporaryDirectory[str]:
    """A new folder on the same file system as the output, removed with what is left in it."""
    return TemporaryDirectory(prefix=f"{Path(prefix).name}.partial-", dir=Path(prefix).parent)


def _refuse_existing(prefix: str) -> None:
    for file in _files(prefix):
        if file.exists():
            raise DataError(f"{file} exists already; delete it or choose another output.")


def _unwritable(prefix: str, error: OSError) -> DataError:
    return DataError(
        f"{prefix}.bin cannot be written ({system_words(error)}); choose another output or make room for it."
    )


def _write(
    source: DocumentSource,
    tokenizer: Tokenizer,
    tokenizer_name: str,
    prefix: str,
    advanced: Callable[[int], None],
) -> Converted:
    """Write the three files at ``prefix``; OSError where that fails."""
    dtype = _dtype(tokenizer.vocabulary)
    lengths: list[int] = []
    empty = 0
    with Path(f"{prefix}.bin").open("wb") as file:
        for first, batch in _batches(source):
            for ids in _encode(tokenizer, source, first, batch):
                if len(ids):
                    file.write(ids.astype(dtype).tobytes())
                    lengths.append(len(ids))
                else:
                    empty += 1
            advanced(sum(map(len, batch)))
    if not lengths:
        raise DataError(
            f"The tokenizer {tokenizer_name} turned all {empty} documents into no token; nothing was written."
        )
    Index.of_documents(lengths, dtype).write(Path(f"{prefix}.idx"))
    done = Converted(tokenizer_name, tokenizer.vocabulary, len(lengths), sum(lengths), empty)
    sidecar(prefix).write_text(json.dumps(asdict(done), indent=2) + "\n", encoding="utf-8")
    return done


def _dtype(vocabulary: int) -> type[np.integer]:
    """The smallest type of the format that holds every id."""
    for dtype in (np.uint8, np.uint16):
        if vocabulary <= np.iinfo(dtype).max + 1:
            return dtype
    return np.int32


def _batches(source: DocumentSource) -> Iterator[tuple[int, list[bytes]]]:
    """Documents in batches of a few megabytes, with the number of the first one."""
    first = 0
    batch: list[bytes] = []
    size = 0
    for document, length in enumerate(source.lengths.tolist()):
        batch.append(_read(source, document, length))
        size += length
        if size >= _BATCH_BYTES:
            yield first, batch
            first, batch, size = document + 1, [], 0
    if batch:
        yield first, batch


def _read(source: DocumentSource, document: int, length: int) -> bytes:
    try:
        return source.read(document, 0, length).astype(np.uint8).tobytes()
    except OSError as error:
        raise DataError(
            f"{source.where(document)} cannot be read ({system_words(error)}); make it readable or remove it."
        ) from None


def _encode(tokenizer: Tokenizer, source: DocumentSource, first: int, batch: list[bytes]) -> list[np.ndarray]:
    try:
        return tokenizer.encode(batch)
    except ValueError:
        # Only one by one does it show which document it was.
        return [_encode_one(tokenizer, source, document, text) for document, text in enumerate(batch, first)]


def _encode_one(tokenizer: Tokenizer, source: DocumentSource, document: int, text: bytes) -> np.ndarray:
    try:
        return tokenizer.encode([text])[0]
    except UnicodeDecodeError:
        raise DataError(
            f"{source.where(document)} is not UTF-8 text, which this tokenizer needs; correct or remove it, or use the "
            "tokenizer bytes."
        ) from None
    except ValueError as error:
        raise DataError(
            f"{source.where(document)} cannot be tokenized: the tokenizer says {str(error)!r}; change the document or "
            "the tokenizer."
        ) from None
