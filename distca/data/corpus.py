"""A corpus: the documents of a source, bounded in length and split into training and validation.

Array legend: D documents. Arrays are int64 where nothing else is said.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from distca.data.blend import Blend
from distca.data.left_out import LeftOut, together
from distca.data.sampler import shuffled
from distca.data.sources.source import DocumentSource
from distca.errors import DataError
from distca.words import count

logger = logging.getLogger(__name__)

Longer = Literal["split", "error", "skip"]
"""The treatment of documents that are longer than the context."""


class DocumentSet:
    """Documents that are token ranges of a source's documents.

    Attributes:
        lengths: [D] tokens per document.
    """

    def __init__(self, source: DocumentSource, document: np.ndarray, offset: np.ndarray, lengths: np.ndarray) -> None:
        """Document i is the range [offset[i], offset[i] + lengths[i]) of the source's document ``document[i]``."""
        self.lengths = lengths
        self._source = source
        self._document = document
        self._offset = offset

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum())

    def choose(self, numbers: np.ndarray) -> list[SetDocument]:
        """Some of its documents, by number."""
        return [SetDocument(self, int(number)) for number in numbers]

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """[stop - start] int64 tokens [start, stop) of one document; the source reads no others."""
        assert 0 <= start <= stop <= self.lengths[document]
        offset = int(self._offset[document])
        return self._source.read(int(self._document[document]), offset + start, offset + stop)

    @property
    def masked(self) -> bool:
        """Whether some tokens are not to be learned."""
        return bool(getattr(self._source, "masked", False))

    def learned(self, document: int, start: int, stop: int) -> np.ndarray:
        """[stop - start] bool, which tokens [start, stop) of one document of a masked set are to be learned."""
        offset = int(self._offset[document])
        learned: np.ndarray = self._source.learned(  # type: ignore[attr-defined]
            int(self._document[document]), offset + start, offset + stop
        )
        return learned


@dataclass(frozen=True)
class SetDocument:
    """One document of a set: a length and slices, which read no other tokens."""

    documents: DocumentSet
    number: int

    def __len__(self) -> int:
        return int(self.documents.lengths[self.number])

    def __getitem__(self, tokens: slice) -> np.ndarray:
        start, stop, step = tokens.indices(len(self))
        assert step == 1
        return self.documents.read(self.number, start, stop)

    def learned(self, tokens: slice) -> np.ndarray | None:
        """Returns a bool for each token of a slice: whether it is to be learned. None means that all are."""
        start, stop, _ = tokens.indices(len(self))
        return self.documents.learned(self.number, start, stop) if self.documents.masked else None


class Corpus:
    """The documents of a source, none longer than the context, in a training and a validation set.

    The split is by document of the source: all pieces of a split document are in one set, so no text is in both. (Two
    documents of the source with equal text are two documents.)

    Attributes:
        train: training documents, in the source's order; of a blend those of an epoch.
        validation: validation documents, in the source's order; empty if ``validation_fraction`` is 0.
        vocabulary: token ids are in [0, vocabulary).
        left_out: documents of the source, and pieces of them, that are in neither set; the log has them too.
    """

    def __init__(
        self,
        source: DocumentSource,
        context_length: int,
        longer: Longer | None = "error",
        validation_fraction: float = 0.0,
        seed: int = 0,
    ) -> None:
        """Cut and split the documents. No token is read; of documents that are cut it is asked what is learned of them.

        Args:
            source: where the documents come from.
            context_length: most tokens of a document.
            longer: what to do with longer documents. ``error`` refuses them and ``skip`` leaves them out. ``split``
                cuts them into consecutive documents of ``context_length`` tokens, the last one shorter, and leaves out
                those of which nothing is learned. None splits texts and leaves out conversations, which are documents
                of sources where only a part is learned.
            validation_fraction: share of the source's documents (not tokens) set aside, in [0, 1); at least one
                document if it is above 0.
            seed: of the choice of validation documents.

        Raises:
            DataError: on documents that are too long, or settings out of range.
        """
        _check_settings(context_length, longer, validation_fraction)
        if longer == "error":
            _check_lengths(source.lengths, context_length)
        masked, long = _masked(source), source.lengths > context_length
        kept = np.flatnonzero(~(long & _skipped(masked, longer)))
        if not len(kept):
            raise DataError(
                f"All of {count(len(long), 'document')} have more than `context_length` {context_length:,} tokens and "
                "are left out; raise it, or set `longer` to split to cut them."
            )
        validation = _chosen(len(kept), validation_fraction, seed)
        self.vocabulary = source.vocabulary
        train, held_back = kept[~validation], kept[validation]
        cutter = _Cutter(source, context_length, masked)
        if isinstance(source, Blend):
            train = source.epoch(train, seed, cutter.kept_tokens(train))
        self.train = cutter.cut(train)
        self.validation = cutter.cut(held_back)
        too_long = LeftOut(len(long) - len(kept), f"of more than {context_length:,} tokens")
        pieces = LeftOut(cutter.empty, "of longer documents with nothing to learn", noun="piece")
        self.left_out = together([*getattr(source, "left_out", ()), too_long, pieces])
        for each in self.left_out:
            logger.info("left out %s", each)
        cut = long[kept]
        if cut.any():
            apart = ", also conversations, whose answers may be apart from their questions"
            logger.info(
                "Documents of more than %s tokens, %s of %s, are split into pieces of so many%s.",
                *(f"{number:,}" for number in (context_length, int(cut.sum()), len(source.lengths))),
                apart if masked[kept][cut].any() else "",
            )


class _Cutter:
    """Makes documents of at most ``context_length`` tokens."""

    def __init__(self, source: DocumentSource, context_length: int, masked: np.ndarray) -> None:
        """Take [D] bool, of which documents only a part is learned."""
        self._source, self._context_length, self._masked = source, context_length, masked
        self._learns: dict[tuple[int, int], bool] = {}

    @property
    def empty(self) -> int:
        """Pieces that were left out, as nothing is learned of them; each once, however often a blend uses it."""
        return len(self._learns) - sum(self._learns.values())

    def cut(self, documents: np.ndarray) -> DocumentSet:
        """The given documents of the source, in pieces."""
        lengths, context = self._source.lengths[documents], self._context_length
        pieces = -(-lengths // context)
        owner = np.repeat(np.arange(len(documents)), pieces)
        nth = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        document, offset = documents[owner], nth * context
        size = np.minimum(lengths[owner] - offset, context)
        asked = np.flatnonzero((pieces > 1)[owner] & self._masked[document])
        kept = np.ones(len(owner), bool)
        parts = zip(*(column[asked].tolist() for column in (document, offset, size)), strict=True)
        kept[asked] = [self._has_targets(*part) for part in parts]
        return DocumentSet(self._source, document[kept], offset[kept], size[kept])

    def kept_tokens(self, documents: np.ndarray) -> np.ndarray:
        """[·] tokens of the pieces of each document, of which the numbers are ascending."""
        tokens = self._source.lengths[documents]
        # Only these documents can lose pieces. A blend may have very many others.
        split = np.flatnonzero(self._masked[documents] & (tokens > self._context_length))
        pieces = self.cut(documents[split])
        owner = np.searchsorted(documents[split], pieces._document)
        tokens[split] = np.bincount(owner, pieces.lengths, len(split))
        return tokens

    def _has_targets(self, document: int, offset: int, size: int) -> bool:
        """Whether a piece has tokens to learn; its first one has nothing before it and is none."""
        if (document, offset) not in self._learns:
            learned = self._source.learned(document, offset + 1, offset + size)  # type: ignore[attr-defined]
            self._learns[document, offset] = bool(learned.any())
        return self._learns[document, offset]


def _masked(source: DocumentSource) -> np.ndarray:
    """[D] bool: of which documents only a part is learned."""
    if isinstance(source, Blend):
        return source.masked_documents
    return np.full(len(source.lengths), getattr(source, "masked", False))


def _skipped(masked: np.ndarray, longer: str | None) -> np.ndarray:
    """[D] bool: which documents are left out where they are too long."""
    return masked if longer is None else np.full(len(masked), longer == "skip")


def _check_settings(context_length: int, longer: str | None, validation_fraction: float) -> None:
    if context_length < 1:
        raise DataError(f"`context_length` is at least 1 token, not {context_length}.")
    if longer not in (None, *get_args(Longer)):
        raise DataError(f"`longer` is one of {', '.join(get_args(Longer))}, not {longer!r}.")
    if not 0 <= validation_fraction < 1:
        raise DataError(f"`validation_fraction` is at least 0 and less than 1, not {validation_fraction}.")


def _check_lengths(lengths: np.ndarray, context_length: int) -> None:
    longest = int(lengths.argmax())
    if lengths[longest] > context_length:
        raise DataError(
            f"Document {longest} has {int(lengths[longest]):,} tokens, more than `context_length` {context_length:,}"
            f" ({int((lengths > context_length).sum()):,} of {len(lengths):,} documents are longer); raise "
            "`context_length`, or set `longer` to split to cut such documents, or to skip to leave them out."
        )


def _chosen(documents: int, fraction: float, seed: int) -> np.ndarray:
    """[documents] bool: which documents are for validation."""
    chosen = np.zeros(documents, dtype=bool)
    held_back = max(1, round(documents * fraction)) if fraction > 0 else 0
    if held_back >= documents:
        raise DataError(
            f"`validation_fraction` {fraction} of {count(documents, 'document')} leaves none for training; lower it, "
            "or set it to 0 for no validation."
        )
    chosen[shuffled(documents, seed)[:held_back]] = True
    return chosen
