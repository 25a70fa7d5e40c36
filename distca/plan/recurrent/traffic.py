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
    """The summaries of one half in one direction.

    Attributes:
        states: own states that travel, one row each.
        transitions: transitions that travel, one row each.
        read: [R] int64 own states that each rank strings together, its own among them.
        read_transitions: [R] int64 the same of transitions.
    """

    states: PairRows
    transitions: PairRows
    read: np.ndarray
    read_transitions: np.ndarray

    def travelling_bytes(self, what: Recurrence) -> int:
        """Bytes that travel between ranks in one layer."""
        return self.states.total * what.state_bytes + self.transitions.total * what.transition_bytes

    def read_bytes(self, what: Recurrence) -> np.ndarray:
        """[R] bytes of all summaries that each rank strings together in one layer."""
        return np.asarray(self.read * what.state_bytes + self.read_transitions * what.transition_bytes)


@dataclass(frozen=True)
class RecurrentHalf:
    """One half of a micro-batch in a recurrent layer.

    Attributes:
        only: [R] int64 rows of documents that are one piece.
        first: [R] int64 rows of the first pieces of others.
        inner: [R] int64 rows of pieces with others on both sides.
        last: [R] int64 rows of last pieces.
        continuing: [R] int64 pieces that begin with a state.
        between: [R] int64 pieces with others on both sides.
        halo: rows that travel before the convolution.
        forward: summaries.
        backward: gradients of states, and transitions.
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


def recurrent_halves(layouts: Sequence[Layout], width: int) -> tuple[RecurrentHalf, ...]:
    """The halves of a micro-batch.

    Args:
        layouts: of the micro-batch's one or two halves.
        width: rows that the convolution reads before a row.
    """
    pieces, halves = DocumentPieces.of(layouts), len(layouts)
    ranks, shards = pieces.ranks, pieces.shards
    halo = halo_rows(pieces, halves, width)
    summaries = [_summaries(pieces, halves, backward) for backward in (False, True)]
    opens, closes = pieces.opens, pieces.closes
    found = []
    for half in range(halves):
        now = pieces.half == half

        def rows(some: np.ndarray, now: np.ndarray = now) -> np.ndarray:
            chosen = now & some
            return np.bincount(shards.rank[chosen], (shards.stop - shards.start)[chosen], ranks).astype(np.int64)

        def count(some: np.ndarray, now: np.ndarray = now) -> np.ndarray:
            return np.bincount(shards.rank[now & some], minlength=ranks)

        home, reader = halo[half]
        found.append(
            RecurrentHalf(
                rows(opens & closes),
                rows(opens & ~closes),
                rows(~opens & ~closes),
                rows(~opens & closes),
                count(~opens),
                count(~opens & ~closes),
                pair_rows(home, reader, np.ones_like(home), ranks),
                summaries[0][half],
                summaries[1][half],
            )
        )
    return tuple(found)


def _summaries(pieces: DocumentPieces, halves: int, backward: bool) -> list[Summaries]:
    reads = ChainReads.of(pieces, backward)
    half, ranks = pieces.half[reads.order], pieces.ranks
    home, reader = reads.home[reads.piece], reads.reader

    def of(sent: np.ndarray) -> tuple[PairRows, np.ndarray]:
        some = np.isin(reads.piece, sent)
        travelling = pair_rows(home[some], reader[some], np.ones(int(some.sum()), np.int64), ranks)
        return travelling, np.bincount(reader[some], minlength=ranks)

    found = []
    for now in range(halves):
        (states, read), (transitions, read_transitions) = (of(sent) for sent in reads.sent(half == now))
        found.append(Summaries(states, transitions, read, read_transitions))
    return found
