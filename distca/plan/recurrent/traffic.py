"""The rows and summaries that recurrent layers compute and move on all ranks, counted from the layouts.

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
    """The summaries of one nano-batch in one direction.

    Attributes:
        states: own states of pieces that travel, one row each.
        transitions: transitions that travel, one row each.
        read: [R] int64 own states of pieces that each rank folds, those of its pieces among them.
        read_transitions: [R] int64 transitions that each rank folds.
    """

    states: PairRows
    transitions: PairRows
    read: np.ndarray
    read_transitions: np.ndarray

    def travelling_bytes(self, what: Recurrence) -> int:
        """Bytes that travel between ranks in one layer."""
        return self.states.total * what.state_bytes + self.transitions.total * what.transition_bytes

    def read_bytes(self, what: Recurrence) -> np.ndarray:
        """[R] bytes of all summaries that each rank folds in one layer."""
        return np.asarray(self.read * what.state_bytes + self.read_transitions * what.transition_bytes)


@dataclass(frozen=True)
class RecurrentNano:
    """One nano-batch of a micro-batch in a recurrent layer.

    Attributes:
        only: [R] int64 rows of documents that are one piece.
        first: [R] int64 rows of the first pieces of other documents.
        inner: [R] int64 rows of pieces that are neither first nor last.
        last: [R] int64 rows of the last pieces of other documents.
        continuing: [R] int64 pieces that begin with a state.
        between: [R] int64 pieces that are neither first nor last.
        halo: rows that travel before the convolution.
        forward: the summaries.
        backward: the gradients of states, with transitions.
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
        """Bytes that travel between ranks in one layer, forward and backward."""
        states = self.forward.travelling_bytes(what) + self.backward.travelling_bytes(what)
        return states + 2 * self.halo.total * what.channels * value_bytes


def recurrent_nanos(layouts: Sequence[Layout], width: int) -> tuple[RecurrentNano, ...]:
    """The rows and summaries of a micro-batch, one entry for each nano-batch.

    Args:
        layouts: the layouts of the micro-batch's nano-batches.
        width: rows that the convolution reads before a row.
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
