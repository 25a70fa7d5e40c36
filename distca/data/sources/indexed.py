"""Megatron's indexed datasets: token ids in a .bin file, lengths and offsets in an .idx file."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np

from distca.data.left_out import BAD, EMPTY, MOST_NAMED, LeftOut, together
from distca.data.sources.index_file import Index, read_index
from distca.errors import DataError
from distca.json_file import read_object
from distca.words import count

logger = logging.getLogger(__name__)


class Indexed:
    """A .bin/.idx pair, read from memory-mapped files.

    Attributes:
        lengths: [D] int64 tokens per document. Empty documents are left out and counted in a log line.
        prefix: path of both files, without suffix.
        vocabulary: from the sidecar PREFIX.json that ``distca data convert`` writes, or as given.
        tokenizer: name and digest of the one that made the ids, from the sidecar; None where it does not say.
        left_out: documents that were left out when the ids were made, from the sidecar.
    """

    def __init__(self, prefix: str, vocabulary: int | None = None) -> None:
        """Open PREFIX.bin and PREFIX.idx.

        Raises:
            DataError: if a file is missing, damaged, empty or of another corpus, or the vocabulary is not known.
        """
        self.prefix = without_suffix(prefix)
        _check_files(self.prefix)
        recorded = _recorded(self.prefix)
        self.vocabulary = _vocabulary(self.prefix, recorded, vocabulary)
        digest = recorded.get("tokenizer_digest")
        self.tokenizer = (str(recorded.get("tokenizer")), str(digest)) if digest else None
        self.left_out = _left_out(self.prefix, recorded)
        self._index = read_index(Path(f"{self.prefix}.idx"))
        _check_recorded(self.prefix, recorded, self._index)
        self._tokens = _open_tokens(self.prefix, self._index)
        ends = np.cumsum(self._index.lengths, dtype=np.int64)
        self._sequence_start = np.concatenate(([0], ends))
        borders = self._sequence_start[self._index.borders]
        lengths = np.diff(borders)
        kept = np.flatnonzero(lengths > 0)
        if len(kept) == 0:
            raise DataError(f"{self.prefix}.idx holds no document with tokens.")
        if len(kept) < len(lengths):
            logger.info("%s: left out %s", self.prefix, count(len(lengths) - len(kept), "empty document"))
        self.lengths = lengths[kept]
        self._document_start = borders[:-1][kept]
        self._mask = _open_mask(self.prefix, recorded, int(self._sequence_start[-1]))

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
                parts.append(self._part(sequence, int(low - self._sequence_start[sequence]), int(high - low)))
        tokens = np.concatenate(parts)
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocabulary:
            outside = tokens.max() if tokens.min() >= 0 else tokens.min()
            raise DataError(
                f"{self.prefix}.bin holds token id {outside} in document {document}, but the vocabulary has "
                f"{self.vocabulary} ids; set `vocabulary` to that of the tokenizer the file was made with."
            )
        return tokens

    @property
    def masked(self) -> bool:
        """Whether some tokens are not to be learned."""
        return self._mask is not None

    def learned(self, document: int, start: int, stop: int) -> np.ndarray:
        """[stop - start] bool, which tokens of a document are to be learned."""
        if self._mask is None:
            return np.ones(stop - start, bool)
        first = int(self._document_start[document])
        return np.asarray(self._mask[first + start : first + stop]).astype(bool)

    def _part(self, sequence: int, start: int, count: int) -> np.ndarray:
        """[count] int64 tokens of one sequence."""
        offset = int(self._index.offsets[sequence]) + start * self._index.dtype.itemsize
        return np.frombuffer(self._tokens, self._index.dtype, count, offset).astype(np.int64)

    def where(self, document: int) -> str:
        """The .bin file and the number of one document among those that hold tokens."""
        return f"{self.prefix}.bin, document {document}"


def sidecar(prefix: str) -> Path:
    """The JSON file beside .bin and .idx that says how they were made."""
    return Path(f"{prefix}.json")


def mask_file(prefix: str) -> Path:
    """The file beside .bin and .idx that says of every token whether it is to be learned; without it all are."""
    return Path(f"{prefix}.mask")


def without_suffix(prefix: str) -> str:
    """The path of both files, also where one of them was named."""
    return prefix[:-4] if prefix.endswith((".bin", ".idx")) else prefix


def _check_files(prefix: str) -> None:
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    present = [file for file in (index, tokens) if file.is_file()]
    if not present:
        raise DataError(f"Neither {index} nor {tokens} exists; `path` is the path of both without the suffix.")
    if len(present) == 1:
        missing = tokens if present == [index] else index
        raise DataError(f"{present[0]} exists but {missing} does not; both are needed, so copy or convert again.")


def _open_tokens(prefix: str, index: Index) -> np.memmap:
    tokens = Path(f"{prefix}.bin")
    present = tokens.stat().st_size
    if len(index.lengths) == 0 or present == 0:  # which cannot be mapped
        raise DataError(f"{tokens} holds no document with tokens.")
    if present != index.bytes:
        wrong = "is cut off" if present < index.bytes else f"is of another corpus than {prefix}.idx"
        raise DataError(f"{tokens} {wrong}: {present:,} bytes instead of {index.bytes:,}; copy or convert again.")
    return np.memmap(tokens, np.uint8, mode="r")


def _open_mask(prefix: str, recorded: dict[str, Any], tokens: int) -> np.memmap | None:
    file = mask_file(prefix)
    if not file.is_file():
        if _has_mask(recorded):
            raise DataError(
                f"{file} is missing, which says what is learned of the conversations in {prefix}.bin; copy it beside "
                "the others, or convert again."
            )
        return None
    if file.stat().st_size != tokens:
        raise DataError(f"{file} has {file.stat().st_size:,} bytes instead of {tokens:,}; copy or convert again.")
    return np.memmap(file, np.uint8, mode="r")


def _has_mask(recorded: dict[str, Any]) -> bool:
    """Whether a mask was written; sidecars of earlier versions say only how conversations became ids."""
    return bool(recorded.get("mask", "chat_template" in recorded))


def _recorded(prefix: str) -> dict[str, Any]:
    """Returns the content of the sidecar; an empty one where there is none."""
    if not os.path.lexists(sidecar(prefix)):
        return {}
    try:
        recorded = read_object(sidecar(prefix))
        return recorded | {"vocabulary": int(recorded["vocabulary"])}
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        raise DataError(f'{sidecar(prefix)} is not a JSON object with a "vocabulary" number; convert again.') from None


def _left_out(prefix: str, recorded: dict[str, Any]) -> tuple[LeftOut, ...]:
    try:
        counts = {reason: int(recorded.get(name, 0)) for name, reason in (("bad", BAD), ("empty", EMPTY))}
        named = tuple(map(str, recorded.get("bad_named", ())))[:MOST_NAMED]
    except (ValueError, TypeError):
        raise DataError(f"{sidecar(prefix)} does not say in numbers what was left out; convert again.") from None
    return together(LeftOut(number, reason, named if reason == BAD else ()) for reason, number in counts.items())


def _check_recorded(prefix: str, recorded: dict[str, Any], index: Index) -> None:
    """Refuse a sidecar of another corpus."""
    counted = {"documents": len(index.borders) - 1, "tokens": int(index.lengths.sum(dtype=np.int64))}
    for name, value in counted.items():
        if recorded.get(name, value) != value:
            raise DataError(
                f"{sidecar(prefix)} is of another corpus than {prefix}.idx: {recorded[name]} {name} instead of "
                f"{value}; copy or convert again."
            )


def _vocabulary(prefix: str, recorded: dict[str, Any], given: int | None) -> int:
    made_with: int | None = recorded.get("vocabulary")
    vocabulary = made_with if given is None else given
    if vocabulary is None:
        raise DataError(
            f"The vocabulary of {prefix}.bin is not known ({sidecar(prefix).name} is missing); set `vocabulary` to "
            "the number of ids of the tokenizer it was made with."
        )
    if made_with is not None and vocabulary < made_with:
        raise DataError(
            f"`vocabulary` is {vocabulary}, but {prefix}.bin was made with {made_with} token ids; set it to "
            f"{made_with} or more."
        )
    return vocabulary
