"""The states that travel, and how each rank strings them together.

A piece turns the state S before it into A·S + B: its *transition* A and its *own state* B are its summary. A rank that
holds a piece gets the summaries of all pieces before it and folds them in their order. Backward is the mirror:
gradients of states come from the pieces behind a piece, so the same is planned with the order of pieces turned round.

The first piece of a document needs no transition, since there is no state before it, and the last one needs no summary
at all. A document of two pieces therefore sends one state and no transition.

Array legend: P pieces in the direction's order, Q pairs of a piece and a rank that reads its summary, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.plan.exchanges import Exchanges, Pieces, RowExchange, Segments
from distca.plan.recurrent.pieces import DocumentPieces, numbered
from distca.plan.sorting import expand


@dataclass(frozen=True)
class Link:
    """One piece of a document on a rank's way through it.

    Attributes:
        piece: number of an own piece among those of the half, which is to have the state that was reached; -1 for
            pieces of other ranks and for the first piece.
        state: where B lies among the states that arrived; -1 where the way ends.
        transition: where A lies among the transitions that arrived; -1 for the first piece of a document.
    """

    piece: int
    state: int
    transition: int


@dataclass(frozen=True)
class ChainRoute:
    """One rank's part of the states of one half, in one direction.

    Attributes:
        sends_state: [S] numbers of this rank's pieces of the half whose own state is sent, in the order in which the
            exchange has them.
        sends_transition: [T] the same of those whose transition is sent.
        states: the exchange of own states, one row each.
        transitions: the exchange of transitions, one row each.
        chains: (document, its links in this half) of each document that this rank has to read. A chain goes on where
            the half before left off.
    """

    sends_state: np.ndarray
    sends_transition: np.ndarray
    states: RowExchange
    transitions: RowExchange
    chains: tuple[tuple[int, tuple[Link, ...]], ...]


@dataclass(frozen=True)
class ChainReads:
    """The reads of summaries in one direction.

    Attributes:
        order: [P] number of each piece among those in the order of documents.
        document: [P] its document.
        home: [P] its rank.
        first: [P] bool, whether it is the first of its document.
        last: [P] bool, whether it is the last of its document.
        piece: [Q] a piece whose summary is read, once by each rank.
        reader: [Q] the rank that reads it, which may be its own.
    """

    order: np.ndarray
    document: np.ndarray
    home: np.ndarray
    first: np.ndarray
    last: np.ndarray
    piece: np.ndarray
    reader: np.ndarray

    @staticmethod
    def of(pieces: DocumentPieces, backward: bool) -> ChainReads:
        """All reads of a micro-batch."""
        order = np.arange(len(pieces))[:: -1 if backward else 1]
        first = (pieces.closes if backward else pieces.opens)[order]
        last = (pieces.opens if backward else pieces.closes)[order]
        home = pieces.shards.rank[order]
        return ChainReads(order, pieces.shards.document[order], home, first, last, *_readers(first, home, pieces.ranks))

    def sent(self, some: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns of ``some`` [P] bool pieces those whose own state is sent, and those whose transition is, too."""
        return np.flatnonzero(some & ~self.last), np.flatnonzero(some & ~self.last & ~self.first)


def chain_routes(pieces: DocumentPieces, halves: int, rank: int, backward: bool) -> tuple[ChainRoute, ...]:
    """The routes of ``rank``, one for each half.

    Args:
        pieces: of the micro-batch.
        halves: nano-batches of the micro-batch.
        rank: whose part is wanted.
        backward: whether gradients of states travel, from a document's last piece to its first.
    """
    reads = ChainReads.of(pieces, backward)
    order, document, home, first = reads.order, reads.document, reads.home, reads.first
    half, number = pieces.half[order], pieces.number[order]
    pairs = reads.piece, reads.reader
    routes = []
    for now in range(halves):
        sends_state, sends_transition = reads.sent(half == now)
        states, state_at = _exchange(sends_state, *pairs, home, pieces.ranks, rank)
        transitions, transition_at = _exchange(sends_transition, *pairs, home, pieces.ranks, rank)
        own = np.flatnonzero((half == now) & (home == rank) & ~first).tolist()
        link_of = {
            piece: Link(
                int(number[piece]) if piece in own else -1, state_at.get(piece, -1), transition_at.get(piece, -1)
            )
            for piece in sorted({*own, *state_at})
        }
        by_document: dict[int, list[Link]] = {}
        for piece, link in link_of.items():
            by_document.setdefault(int(document[piece]), []).append(link)
        of_states, of_transitions = (number[sent[home[sent] == rank]] for sent in (sends_state, sends_transition))
        chains = tuple((which, tuple(links)) for which, links in by_document.items())
        routes.append(ChainRoute(of_states, of_transitions, states, transitions, chains))
    return tuple(routes)


def _readers(first: np.ndarray, home: np.ndarray, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of a piece and a rank that has a later piece of its document: [Q] each, the pieces of each rank in
    their order."""
    begins = np.flatnonzero(first)
    which = np.cumsum(first) - 1
    # The last piece that each rank has of each document: what stands behind it is not read.
    key = which * ranks + home
    order = np.argsort(key, kind="stable")
    ends = order[np.append(key[order][1:] != key[order][:-1], True)[: len(order)]]
    begin = begins[which[ends]]
    return expand(begin, ends - begin), np.repeat(home[ends], ends - begin)


def _exchange(
    sent: np.ndarray, piece: np.ndarray, reader: np.ndarray, home: np.ndarray, ranks: int, rank: int
) -> tuple[RowExchange, dict[int, int]]:
    """The exchange of one row for each of the ``sent`` pieces, and where it arrives on ``rank``, by piece."""
    source = np.full(len(home), -1)
    source[sent] = numbered(home[sent])
    pairs = np.flatnonzero(source[piece] >= 0)
    what, to = piece[pairs], reader[pairs]
    destination = numbered(to, what)
    exchange = Exchanges(
        Pieces(home[what], to, source[what], destination, np.ones_like(what)),
        np.bincount(home[sent], minlength=ranks),
        rank,
    )
    mine = to == rank
    arrived = dict(zip(what[mine].tolist(), destination[mine].tolist(), strict=True))
    return exchange.of(rank, int(mine.sum()), Segments.none(), Segments.none()), arrived
