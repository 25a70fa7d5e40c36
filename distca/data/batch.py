"""The tokens of one rank in one micro-batch.

Array legend: N rows of the rank, over its nano-batches and with padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from distca.errors import DataError
from distca.plan.layout import Layout


class Document(Protocol):
    """Anything with a length and slices of token ids: a list, an array, a memory map. A rank asks for its own rows, and
    of some documents for a few ids, which ranks compare. One that has ``learned(slice)`` says which of them are
    targets: bool, or None for all."""

    def __len__(self) -> int: ...
    def __getitem__(self, tokens: slice, /) -> Any: ...


@dataclass(frozen=True)
class RankBatch:
    """The tokens that a rank trains on, with their labels, masks and positions.

    Attributes:
        tokens: [N] int64 token ids.
        labels: [N] int64, the next token of the same document, also where that token lives on another rank.
        loss_mask: [N] bool, or [N] float32 weights where documents have some. It is False on padding, before
            tokens that are not to be learned, and on a document's last token, which has no next one.
        documents: [N] int64, the number of the row's document in the micro-batch; -1 in padding.
        positions: [N] int64 positions in the document.
        lengths: [N] int64 tokens of the whole document; 0 in padding.
        nano_rows: rows of each nano-batch, padding included; their sum is N.
        micro_batch_lengths: [documents] int64 tokens of every document of the micro-batch, wherever it lives.
    """

    tokens: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray
    positions: np.ndarray
    lengths: np.ndarray
    documents: np.ndarray
    nano_rows: tuple[int, ...]
    micro_batch_lengths: np.ndarray


@dataclass(frozen=True)
class _Rows:
    tokens: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray
    positions: np.ndarray
    lengths: np.ndarray
    documents: np.ndarray

    def columns(self) -> tuple[np.ndarray, ...]:
        return self.tokens, self.labels, self.loss_mask, self.positions, self.lengths, self.documents


def rank_batch(
    documents: Sequence[Document],
    layouts: tuple[Layout, ...],
    rank: int,
    *,
    align: int = 1,
    chunks: int = 1,
    weights: np.ndarray | None = None,
) -> RankBatch:
    """Read one rank's tokens: its own rows, and one token more where a document goes on elsewhere.

    Every nano-batch is padded at its end to a multiple of ``align`` rows, and to at least ``align``: token 0, label 0,
    no loss, position 0, part of no document. Sequence parallelism hands the micro-batch's rows to tensor-parallel ranks
    in contiguous chunks, so each chunk holds its share of every nano-batch, in order: with two nano-batches and two
    chunks ping[:half], pong[:half], ping[half:], pong[half:].

    Args:
        documents: of the micro-batch.
        layouts: where their tokens live, one layout per nano-batch, as ``lay_out`` made them from their lengths.
        rank: home rank to read for.
        align: rows of every nano-batch are a multiple of this.
        chunks: tensor-parallel ranks that share the rows; divides ``align``.
        weights: [documents] what each target of a document weighs in the loss; None weighs all alike.

    Raises:
        DataError: ``align`` is not a multiple of ``chunks``, or a document of anything but token ids.
    """
    if chunks < 1 or align < 1 or align % chunks:
        raise DataError(
            f"Rows are aligned to {align}, which is not a multiple of the {chunks} tensor-parallel ranks that share "
            "them."
        )
    everyone = np.array([len(document) for document in documents], np.int64)
    nano_batches = [_padded(_read(documents, layout, rank, weights), align) for layout in layouts]
    columns = zip(*(rows.columns() for rows in nano_batches), strict=True)
    nano_rows = tuple(len(rows.tokens) for rows in nano_batches)
    tokens, labels, loss_mask, positions, lengths, numbers = (_interleaved(column, chunks) for column in columns)
    return RankBatch(tokens, labels, loss_mask, positions, lengths, numbers, nano_rows, everyone)


def _read(documents: Sequence[Document], layout: Layout, rank: int, weights: np.ndarray | None) -> _Rows:
    """The rank's rows of one nano-batch, in row order."""
    assert len(layout.last) == len(documents), "the layout was made for another micro-batch"
    rows = int(layout.q_rows[rank])
    read = _Rows(
        tokens=np.zeros(rows, np.int64),
        labels=np.zeros(rows, np.int64),
        loss_mask=np.zeros(rows, bool if weights is None else np.float32),
        positions=np.zeros(rows, np.int64),
        lengths=np.zeros(rows, np.int64),
        documents=np.zeros(rows, np.int64),
    )
    shards = layout.q.on_rank(rank)
    for document, start, stop, _, row in zip(*(column.tolist() for column in shards.columns()), strict=True):
        behind = min(stop + 1, len(documents[document]))
        content = np.asarray(documents[document][start:behind])
        if content.dtype.kind not in "iu" or content.ndim != 1:
            raise DataError(
                f"Document {document} gives {content.dtype} of shape {content.shape} in place of token ids; give whole "
                "numbers one after the other."
            )
        if len(content) != behind - start:
            raise DataError(
                f"Document {document} has a length of {len(documents[document])}, and {len(content)} token ids from "
                f"{start} to {behind}."
            )
        targets = content[1:]
        read.tokens[row : row + stop - start] = content[: stop - start]
        read.labels[row : row + len(targets)] = targets
        learned = targets_of(documents[document], slice(start + 1, behind))
        read.loss_mask[row : row + len(targets)] = learned if weights is None else learned * weights[document]
        read.documents[row : row + stop - start] = document
        read.positions[row : row + stop - start] = np.arange(start, stop)
        read.lengths[row : row + stop - start] = len(documents[document])
    return read


def targets_of(document: Document, tokens: slice) -> np.ndarray:
    """Returns a bool for each token of a slice: whether it is to be learned. A document's first token never is,
    whatever this says.

    Raises:
        DataError: the document does not say it of each.
    """
    asked = getattr(document, "learned", None)
    if asked is not None and not callable(asked):
        raise DataError(
            f"A document's `learned` is a {type(asked).__name__}; it is to be a function, which says of a slice which "
            "tokens are learned."
        )
    learned = None if asked is None else asked(tokens)
    if learned is None:
        return np.ones(tokens.stop - tokens.start, bool)
    if np.shape(learned) != (tokens.stop - tokens.start,):
        raise DataError(
            f"A document's `learned` gives an array of shape {np.shape(learned)} for tokens {tokens.start} to "
            f"{tokens.stop}; it is to give one for each."
        )
    values = np.asarray(learned)
    if values.dtype != bool and not (known := (values == 0) | (values == 1)).all():
        raise DataError(
            f"A document's `learned` gives {values[~known][0]} for one of tokens {tokens.start} to {tokens.stop}; it "
            "says whether each is learned, True or False."
        )
    return values.astype(bool)


def _padded(rows: _Rows, align: int) -> _Rows:
    missing = max(align, -(-len(rows.tokens) // align) * align) - len(rows.tokens)
    padded = _Rows(*(np.pad(column, (0, missing)) for column in rows.columns()))
    padded.documents[len(rows.tokens) :] = -1
    return padded


def _interleaved(nano_batches: tuple[np.ndarray, ...], chunks: int) -> np.ndarray:
    return np.concatenate([rows.reshape(chunks, -1) for rows in nano_batches], axis=1).reshape(-1)
