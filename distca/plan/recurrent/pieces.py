"""Finds, in layouts, the *pieces* of documents that a recurrent layer (linear attention, SSM) computes.

A micro-batch is computed in one or two parts, the *nano-batches* ping (first) and pong (second). A piece is a range of
a document's rows on one rank in one nano-batch.

Array legend: P pieces. Arrays are int64 unless noted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca.plan.layout import Layout, Shards
from distca.plan.sorting import order_by


@dataclass(frozen=True, eq=False)
class DocumentPieces:
    """The pieces of all documents that are planned together, sorted by (document, start). These are the documents of a
    micro-batch. With pipeline stages, these are the documents of all micro-batches that stages run at the same time.

    Attributes:
        ranks: number of ranks in the layouts.
        nano: [P] nano-batch of each piece: 0 for ping, 1 for pong.
        shards: [P] document, start and stop in the document, rank, and first row in the rank's tensor of this
            nano-batch.
    """

    ranks: int
    nano: np.ndarray
    shards: Shards

    @staticmethod
    def of(layouts: Sequence[Layout]) -> DocumentPieces:
        """Returns the pieces; ``layouts`` has the documents' rows on each rank, for each nano-batch.

        Ranges that follow each other in a document and in a rank's tensor become one piece."""
        # Ranges are sorted by document and start. "joins" is whether a range continues the piece of the range before.
        # "heads" and "tails" are the first and last ranges of pieces.
        nano = np.concatenate([np.full(len(each.q), number) for number, each in enumerate(layouts)])
        columns = [np.concatenate(parts) for parts in zip(*(each.q.columns() for each in layouts), strict=True)]
        order = order_by(columns[0], columns[1])
        nano = nano[order].astype(np.int64)
        document, start, stop, rank, row = (column[order] for column in columns)
        goes_on = (document[1:] == document[:-1]) & (start[1:] == stop[:-1])
        assert bool(goes_on[document[1:] == document[:-1]].all()), "a document has a gap between its ranges"
        joins = goes_on & (nano[1:] == nano[:-1]) & (rank[1:] == rank[:-1])
        joins &= row[1:] == row[:-1] + (stop - start)[:-1]
        heads = np.flatnonzero(np.append(True, ~joins)[: len(document)])
        tails = np.append(heads[1:] - 1, len(document) - 1)[: len(heads)]
        shards = Shards(document[heads], start[heads], stop[tails], rank[heads], row[heads])
        assert bool((nano[heads][1:] >= nano[heads][:-1])[document[heads][1:] == document[heads][:-1]].all()), (
            "pong has rows of a document that come before rows of ping"
        )
        return DocumentPieces(layouts[0].ranks, nano[heads], shards)

    def __len__(self) -> int:
        return len(self.nano)

    @cached_property
    def opens(self) -> np.ndarray:
        """Returns [P] bool, whether the piece is the first of its document."""
        document = self.shards.document
        return np.append(True, document[1:] != document[:-1])[: len(self)]

    @cached_property
    def closes(self) -> np.ndarray:
        """Returns [P] bool, whether the piece is the last of its document."""
        document = self.shards.document
        return np.append(document[1:] != document[:-1], True)[: len(self)]

    @cached_property
    def number(self) -> np.ndarray:
        """Returns [P] number of each piece in its rank and nano-batch, from 0, in the order of the rank's rows."""
        return numbered(self.shards.rank * 2 + self.nano, self.shards.row)

    def of_rank(self, rank: int, nano: int) -> np.ndarray:
        """Returns the indices of the pieces of a rank and nano-batch, in the order of the rank's rows."""
        mine = np.flatnonzero((self.shards.rank == rank) & (self.nano == nano))
        return mine[np.argsort(self.shards.row[mine], kind="stable")]


def numbered(group: np.ndarray, *keys: np.ndarray) -> np.ndarray:
    """Returns [N] number of each element in its ``group`` [N], counted from 0 in the order of the ``keys``.

    Example: without keys, the groups 7, 4, 7, 4 and 7 give 0, 0, 1, 1 and 2. Each key is [N]; the second key decides
    where the first is equal."""
    # In the sorted order, an element's number is its index minus the index of its group's first element.
    order = order_by(group, *keys)
    ordered = group[order]
    begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)])
    counts = np.diff(np.append(begins, len(ordered)))
    number = np.empty(len(group), np.int64)
    number[order] = np.arange(len(group)) - np.repeat(begins, counts)
    return number
