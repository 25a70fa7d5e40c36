"""The rows of a rank as Megatron-Core wants packed documents: each padded, and cut over context-parallel ranks.

Context parallelism of C ranks cuts every document into 2·C equal chunks, of which rank r holds number r and number
2·C − 1 − r. Padding is at a document's end, so that no token of the document sees it, and is not learned; Megatron's
own packing of conversations does the same. Array legend: N rows of a rank, D documents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.data.batch import Document, targets_of


@dataclass(frozen=True)
class Rows:
    """One rank's rows of a micro-batch.

    Attributes:
        tokens: [N] int64.
        labels: [N] int64, the next token of the same document.
        learned: [N] bool; False on a document's last token, on what is not to be learned and on padding.
        positions: [N] int64 positions in the document.
        borders: [D + 1] int32, where documents with their padding begin and end, over the ranks of the group.
    """

    tokens: np.ndarray
    labels: np.ndarray
    learned: np.ndarray
    positions: np.ndarray
    borders: np.ndarray

    @property
    def longest(self) -> int:
        """Tokens of the longest document, its padding included."""
        return int(np.diff(self.borders).max())


def packed_rows(documents: Sequence[Document], ranks: int, rank: int, align: int = 1) -> Rows:
    """Read the documents of a context-parallel group, one behind the other, and take one rank's part.

    Args:
        documents: of the group; without any there is one of padding.
        ranks: of the group.
        rank: within it.
        align: every rank's rows are a multiple of it, by padding of the last document.
    """
    chunks = 2 * ranks if ranks > 1 else 1
    sizes = [-(-len(document) // chunks) * chunks for document in documents] or [0]
    unit = math.lcm(chunks, align * ranks)
    sizes[-1] += -sum(sizes) % unit or (0 if sum(sizes) else unit)
    borders = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    mine = _of_rank(borders, ranks, rank)
    tokens, labels, learned, positions = (column[mine] for column in _read(documents, borders))
    return Rows(tokens, labels, learned, positions, borders)


def _read(documents: Sequence[Document], borders: np.ndarray) -> tuple[np.ndarray, ...]:
    """Tokens, labels, what is learned and positions of all documents with their padding."""
    total = int(borders[-1])
    tokens, labels, positions = (np.zeros(total, np.int64) for _ in range(3))
    learned = np.zeros(total, bool)
    for document, first, end in zip(documents, borders[:-1].tolist(), borders[1:].tolist(), strict=False):
        content, last = np.asarray(document[0 : len(document)]), first + len(document) - 1
        tokens[first : last + 1] = content
        labels[first:last] = content[1:]
        learned[first:last] = targets_of(document, slice(1, len(document)))
        positions[first:end] = np.arange(end - first)
    return tokens, labels, learned, positions


def _of_rank(borders: np.ndarray, ranks: int, rank: int) -> np.ndarray:
    """[N] rows of the group that one rank holds, document by document: chunk ``rank`` and its opposite."""
    if ranks == 1:
        return np.arange(int(borders[-1]))
    found = []
    for first, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        chunk = (end - first) // (2 * ranks)
        for number in (rank, 2 * ranks - 1 - rank):
            found.append(np.arange(first + number * chunk, first + (number + 1) * chunk))
    return np.concatenate(found)
