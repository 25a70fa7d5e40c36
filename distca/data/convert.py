"""Conversion: a byte-level source to Megatron's .bin/.idx, tokenized, with a sidecar that names the vocabulary."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from distca.data.errors import DataError
from distca.data.sources.indexed import megatron_module, sidecar
from distca.data.sources.source import DocumentSource
from distca.data.tokenizer import Tokenizer

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

    The index is written last and the sidecar after it, so an interrupted conversion leaves a .bin that nothing opens.

    Args:
        source: a source whose tokens are bytes of text.
        tokenizer: turns each document into ids.
        tokenizer_name: recorded in the sidecar.
        output: path of the files, without suffix.
        advanced: called with the number of bytes done since the last call.

    Raises:
        DataError: if an output file exists, a document cannot be tokenized, no token comes out, or megatron-core is
            missing.
    """
    _check_output(output)
    module = megatron_module("Writing")
    import torch

    Path(output).parent.mkdir(parents=True, exist_ok=True)
    builder = module.IndexedDatasetBuilder(f"{output}.bin", dtype=_dtype(tokenizer.vocabulary))
    documents = tokens = empty = 0
    for first, batch in _batches(source):
        for ids in _encode(tokenizer, first, batch):
            if len(ids):
                builder.add_item(torch.from_numpy(ids))
                builder.end_document()
                documents += 1
                tokens += len(ids)
            else:
                empty += 1
        advanced(sum(map(len, batch)))
    if documents == 0:
        builder.data_file.close()
        Path(f"{output}.bin").unlink()
        raise DataError(
            f"The tokenizer {tokenizer_name} turned all {empty} documents into no token; nothing was written."
        )
    builder.finalize(f"{output}.idx")
    done = Converted(tokenizer_name, tokenizer.vocabulary, documents, tokens, empty)
    sidecar(output).write_text(json.dumps(asdict(done), indent=2) + "\n", encoding="utf-8")
    return done


def _check_output(output: str) -> None:
    for file in (Path(f"{output}.bin"), Path(f"{output}.idx"), sidecar(output)):
        if file.exists():
            raise DataError(f"{file} exists already; delete it or choose another output.")


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
        batch.append(source.read(document, 0, length).astype(np.uint8).tobytes())
        size += length
        if size >= _BATCH_BYTES:
            yield first, batch
            first, batch, size = document + 1, [], 0
    if batch:
        yield first, batch


def _encode(tokenizer: Tokenizer, first: int, batch: list[bytes]) -> list[np.ndarray]:
    try:
        return tokenizer.encode(batch)
    except UnicodeDecodeError:
        wrong = next(index for index, document in enumerate(batch) if not _is_text(document))
        raise DataError(
            f"Document {first + wrong} of the source is not UTF-8 text, which this tokenizer needs; correct or remove "
            "it, or use the tokenizer bytes."
        ) from None


def _is_text(document: bytes) -> bool:
    try:
        document.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
