"""Counts the rows and summaries that each rank computes, sends and reads in a recurrent layer (linear attention, SSM).

A micro-batch is computed in one or two parts, the *nano-batches*. A *piece* is a range of a document's rows on one rank
in one nano-batch. Two things travel between ranks:

- *halo* rows: the few rows of the document before a piece, which the piece's convolution reads.
- *summaries*: a piece turns the recurrent state S before it into A·S + B. Its summary is the *transition* A and the
  *own state* B. In backward, gradients of states take the place of own states.

Array legend: R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.plan.layout import Layout
from distca.plan.metrics import PairRows, pair_rows
from distca.plan.recurrence import Recurrence
from distca.plan.recurrent.chains import ChainReads
from distca.plan.recurrent.halo import halo_rows
from distca.plan.recurrent.pieces import DocumentPieces


@dataclass(frozen=True)
class Summaries:
    """How many own states and transitions ranks send and read, in forward or in backward of one nano-batch.

    Attributes:
        states, transitions: for each pair of ranks, how many own states, and how many transitions, travel.
        read, read_transitions: [R] int64, how many own states, and how many transitions, each rank reads, also of its
            own pieces.
    """

    states: PairRows
    transitions: PairRows
    read: np.ndarray
    read_transitions: np.ndarray

    def travelling_bytes(self, what: Recurrence) -> int:
        """Returns the bytes that travel in one layer, all ranks together."""
        return self.states.total * what.state_bytes + self.transitions.total * what.transition_bytes

    def read_bytes(self, what: Recurrence) -> np.ndarray:
        """Returns [R] bytes that each rank reads in one layer."""
        return np.asarray(self.read * what.state_bytes + self.read_transitions * what.transition_bytes)


@dataclass(frozen=True)
class RecurrentNano:
    """The counts of one nano-batch.

    Attributes:
        only: [R] int64 rows in pieces that are a whole document.
        first, inner, last: [R] int64 rows in first, inner and last pieces of documents with several pieces.
        continuing: [R] int64 number of pieces that are not the first of their document.
        between: [R] int64 number of inner pieces.
        halo: for each pair of ranks, the number of halo rows that travel.
    """

    only: np.ndarray
    first: np.ndarray
    inner: np.ndarray
    last: np.ndarray
    continuing: np.ndarray
    between: np.ndarray
    halo: PairRows
    forward: Summaries
    backward: Summaries

    def travelling_bytes(self, what: Recurrence, value_bytes: int = 2) -> int:
        """Returns the bytes that travel in one layer, forward and backward; each halo value has ``value_bytes``."""
        states = self.forward.travelling_bytes(what) + self.backward.travelling_bytes(what)
        return states + 2 * self.halo.total * what.channels * value_bytes


def recurrent_nanos(layouts: Sequence[Layout], width: int) -> tuple[RecurrentNano, ...]:
    """Returns the counts of each nano-batch.

    Args:
        layouts: for each nano-batch, the documents' rows on each rank.
        width: number of rows that the convolution reads before each row.
    """
    pieces, nano_batches = DocumentPieces.of(layouts), len(layouts)
    ranks, shards = pieces.ranks, pieces.shards
    halo = halo_rows(pieces, nano_batches, width)
    summaries = [_summaries(pieces, nano_batches, backward) for backward in (False, True)]
    opens, closes = pieces.opens, pieces.closes
    found = []
    for nano in range(nano_batches):
        now = pieces.nano == nano

        def rows(some: np.ndarray, now: np.ndarray = now) -> np.ndarray:
            chosen = now & some
            return np.bincount(shards.rank[chosen], (shards.stop - shards.start)[chosen], ranks).astype(np.int64)

        def count(some: np.ndarray, now: np.ndarray = now) -> np.ndarray:
            return np.bincount(shards.rank[now & some], minlength=ranks)

        home, reader = halo[nano]
        found.append(
            RecurrentNano(
                rows(opens & closes),
                rows(opens & ~closes),
                rows(~opens & ~closes),
                rows(~opens & closes),
                count(~opens),
                count(~opens & ~closes),
                pair_rows(home, reader, np.ones_like(home), ranks),
                summaries[0][nano],
                summaries[1][nano],
            )
        )
    return tuple(found)


def _summaries(pieces: DocumentPieces, nano_batches: int, backward: bool) -> list[Summaries]:
    reads = ChainReads.of(pieces, backward)
    nano, ranks = pieces.nano[reads.order], pieces.ranks
    home, reader = reads.home[reads.piece], reads.reader

    def of(sent: np.ndarray) -> tuple[PairRows, np.ndarray]:
        some = np.isin(reads.piece, sent)
        travelling = pair_rows(home[some], reader[some], np.ones(int(some.sum()), np.int64), ranks)
        return travelling, np.bincount(reader[some], minlength=ranks)

    found = []
    for now in range(nano_batches):
        (states, read), (transitions, read_transitions) = (of(sent) for sent in reads.sent(nano == now))
        found.append(Summaries(states, transitions, read, read_transitions))
    return found
