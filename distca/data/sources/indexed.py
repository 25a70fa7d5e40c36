"""Megatron's indexed datasets: token ids in a .bin file, lengths and offsets in an .idx file."""

from __future__ import annotations

import json
import logging
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from distca.errors import DataError

logger = logging.getLogger(__name__)

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_INTEGER_CODES = (1, 2, 3, 4, 5, 8)  # 6 and 7 are floating-point types


class Indexed:
    """A .bin/.idx pair, read through megatron-core's IndexedDataset with memory-mapped files.

    Attributes:
        lengths: [D] int64 tokens per document. Empty documents are left out and counted in a log line.
        vocabulary: from the sidecar PREFIX.json that ``distca data convert`` writes, or as given.
    """

    def __init__(self, prefix: str, vocabulary: int | None = None) -> None:
        """Open PREFIX.bin and PREFIX.idx.

        Raises:
            DataError: if a file is missing, damaged or empty, or the vocabulary is not known.
        """
        self._prefix = without_suffix(prefix)
        _check_files(self._prefix)
        self.vocabulary = _vocabulary(self._prefix, vocabulary)
        self._dataset = _open(self._prefix)
        ends = np.cumsum(self._dataset.sequence_lengths, dtype=np.int64)
        self._sequence_start = np.concatenate(([0], ends))
        borders = self._sequence_start[self._dataset.document_indices]
        lengths = np.diff(borders)
        kept = np.flatnonzero(lengths > 0)
        if len(kept) == 0:
            raise DataError(f"{self._prefix}.idx holds no document with tokens.")
        if len(kept) < len(lengths):
            logger.info("%s: left out %d empty documents", self._prefix, len(lengths) - len(kept))
        self.lengths = lengths[kept]
        self._document_start = borders[:-1][kept]

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """[stop - start] int64 tokens of one document, which may consist of several sequences.

        Raises:
            DataError: if a token id lies outside the vocabulary.
        """
        assert 0 <= start <= stop <= self.lengths[document]
        begin, end = self._document_start[document] + start, self._document_start[document] + stop
        first = int(np.searchsorted(self._sequence_start, begin, side="right")) - 1
        last = int(np.searchsorted(self._sequence_start, end, side="left"))
        parts = [np.zeros(0, np.int64)]
        for sequence in range(first, last):
            low = max(begin, self._sequence_start[sequence])
            high = min(end, self._sequence_start[sequence + 1])
            if high > low:
                offset = int(low - self._sequence_start[sequence])
                parts.append(self._dataset.get(sequence, offset, int(high - low)).astype(np.int64))
        tokens = np.concatenate(parts)
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocabulary:
            outside = tokens.max() if tokens.min() >= 0 else tokens.min()
            raise DataError(
                f"{self._prefix}.bin holds token id {outside} in document {document}, but the vocabulary has "
                f"{self.vocabulary} ids; set data.vocabulary to that of the tokenizer the file was made with."
            )
        return tokens

    def where(self, document: int) -> str:
        """The .bin file and the number of one document among those that hold tokens."""
        return f"{self._prefix}.bin, document {document}"


def sidecar(prefix: str) -> Path:
    """The JSON file beside .bin and .idx that says how they were made."""
    return Path(f"{prefix}.json")


def without_suffix(prefix: str) -> str:
    """The path of both files, also where one of them was named."""
    return prefix[:-4] if prefix.endswith((".bin", ".idx")) else prefix


def _check_files(prefix: str) -> None:
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    present = [file for file in (index, tokens) if file.is_file()]
    if not present:
        raise DataError(f"Neither {index} nor {tokens} exists; data.path is the path of both without the suffix.")
    if len(present) == 1:
        missing = tokens if present == [index] else index
        raise DataError(f"{present[0]} exists but {missing} does not; both are needed, so copy or convert again.")
    _check_sizes(index, tokens)


def _check_sizes(index: Path, tokens: Path) -> None:
    """Compare the counts in the index header with the file sizes, before anything is memory-mapped."""
    with index.open("rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise DataError(f"{index} is not an index of Megatron's .bin/.idx format.")
    _, version, code, sequences, borders = _HEADER.unpack(header)
    if version != 1:
        raise DataError(f"{index} has format version {version}; only version 1 can be read.")
    if code not in _INTEGER_CODES:
        raise DataError(f"{index} names number type {code}, which is no integer type, so {tokens} holds no token ids.")
    if index.stat().st_size < _HEADER.size + 12 * sequences + 8 * borders:
        raise DataError(
            f"{index} is cut off: it announces {sequences} sequences but ends before; copy or convert again."
        )
    if sequences == 0 or tokens.stat().st_size == 0:
        raise DataError(f"{tokens} holds no document with tokens.")


def _vocabulary(prefix: str, given: int | None) -> int:
    recorded: int | None = None
    if sidecar(prefix).is_file():
        try:
            recorded = int(json.loads(sidecar(prefix).read_text(encoding="utf-8"))["vocabulary"])
        except (ValueError, KeyError, TypeError):
            raise DataError(
                f'{sidecar(prefix)} is not a JSON object with a "vocabulary" number; convert again.'
            ) from None
    if recorded is None and given is None:
        raise DataError(
            f"The vocabulary of {prefix}.bin is not known ({sidecar(prefix).name} is missing); set data.vocabulary to "
            "the number of ids of the tokenizer it was made with."
        )
    if recorded is not None and given is not None and given < recorded:
        raise DataError(
            f"data.vocabulary is {given}, but {prefix}.bin was made with {recorded} token ids; set it to {recorded} "
            "or more."
        )
    vocabulary = given if given is not None else recorded
    assert vocabulary is not None
    return vocabulary


def megatron_module(doing: str) -> Any:
    """megatron-core's module of indexed datasets; ``doing`` it is why the module is wanted.

    Raises:
        DataError: where it cannot be imported.
    """
    try:
        with warnings.catch_warnings():
            # megatron-core says once per module that Transformer Engine and Apex are missing; data needs neither.
            warnings.simplefilter("ignore")
            from megatron.core.datasets import indexed_dataset
    except ImportError as error:
        raise DataError(f"{doing} .bin/.idx files needs megatron-core, which did not import ({error}).") from error
    return indexed_dataset


def _open(prefix: str) -> Any:
    module = megatron_module("Reading")
    try:
        dataset = module.IndexedDataset(prefix)
    except (AssertionError, ValueError) as error:
        raise DataError(f"{prefix}.idx cannot be read: {str(error) or 'its counts contradict each other'}.") from error
    index = dataset.index
    needed = int((index.sequence_pointers + index.sequence_lengths.astype(np.int64) * index.dtype_size).max())
    present = Path(f"{prefix}.bin").stat().st_size
    if np.diff(index.document_indices).min(initial=0) < 0 or index.document_indices.min(initial=0) < 0:
        raise DataError(f"{prefix}.idx cannot be read: its documents are not in order.")
    if present < needed:
        raise DataError(f"{prefix}.bin is cut off: {present:,} bytes instead of {needed:,}; copy or convert again.")
    return dataset
