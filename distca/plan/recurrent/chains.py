"""The states that travel, and how each rank strings them together.

A piece turns the state S before it into A·S + B: its *transition* A and its *own state* B are its summary. A rank that
holds a piece gets the summaries of all pieces before it and folds them in their order. In backward, gradients of states
come from the pieces behind a piece, so the same is planned with the pieces in reverse order.

The first piece of a document sends no transition, since there is no state before it. The last one sends no summary at
all. Example: a document has pieces on ranks 0, 1 and 2. Rank 0 sends B0 to ranks 1 and 2, and rank 1 sends A1 and B1 to
rank 2. The state before piece 1 is B0, and the state before piece 2 is A1·B0 + B1.

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
        piece: number of an own piece, among the rank's pieces of the nano-batch, that needs the state reached so far;
            -1 for pieces of other ranks and for the first piece.
        state: where B lies among the states that arrived; -1 for the last piece that the rank reads.
        transition: where A lies among the transitions that arrived; -1 for the first piece of a document.
    """

    piece: int
    state: int
    transition: int


@dataclass(frozen=True)
class ChainRoute:
    """One rank's part of the states of one nano-batch, in one direction.

    Attributes:
        sends_state: [S] numbers of this rank's pieces of the nano-batch whose own state is sent, in the order in which
            the exchange has them.
        sends_transition: [T] numbers of those whose transition is sent.
        states: the exchange of own states, one row each.
        transitions: the exchange of transitions, one row each.
        chains: (document, its links in this nano-batch) for each document that this rank has to read. A chain goes on
            where the nano-batch before left off.
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
        order: [P] index of each piece in the order of documents; reversed for backward.
        document: [P] document of each piece.
        home: [P] rank of each piece.
        first: [P] bool, whether it is the first of its document in this direction.
        last: [P] bool, whether it is the last of its document in this direction.
        piece: [Q] a piece whose summary is read, once by each rank.
        reader: [Q] the rank that reads it, which may be the piece's own.
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
        """Returns which of ``some`` [P] bool pieces send their own state, and which of them send their transition
        too."""
        return np.flatnonzero(some & ~self.last), np.flatnonzero(some & ~self.last & ~self.first)


def chain_routes(pieces: DocumentPieces, nano_batches: int, rank: int, backward: bool) -> tuple[ChainRoute, ...]:
    """The routes of ``rank``, one for each nano-batch.

    Args:
        pieces: the pieces of the micro-batch.
        nano_batches: number of its nano-batches.
        rank: the rank whose part is wanted.
        backward: whether gradients of states travel, from a document's last piece to its first.
    """
    reads = ChainReads.of(pieces, backward)
    order, document, home, first = reads.order, reads.document, reads.home, reads.first
    nano, number = pieces.nano[order], pieces.number[order]
    pairs = reads.piece, reads.reader
    routes = []
    for now in range(nano_batches):
        sends_state, sends_transition = reads.sent(nano == now)
        states, state_at = _exchange(sends_state, *pairs, home, pieces.ranks, rank)
        transitions, transition_at = _exchange(sends_transition, *pairs, home, pieces.ranks, rank)
        own = np.flatnonzero((nano == now) & (home == rank) & ~first).tolist()
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
    """All pairs of a piece and a rank that reads its summary: [Q] each, the pieces of each rank in their order.

    A rank reads all pieces of a document before the last one that it has. Example: pieces lie on ranks 0, 1, 0 and 2.
    Rank 0 reads the first two, rank 1 the first one, and rank 2 the first three."""
    # "which" numbers documents; a rank's last piece of one is the last of its equal keys, as pieces stand in order.
    begins = np.flatnonzero(first)
    which = np.cumsum(first) - 1
    key = which * ranks + home
    order = np.argsort(key, kind="stable")
    ends = order[np.append(key[order][1:] != key[order][:-1], True)[: len(order)]]
    begin = begins[which[ends]]
    return expand(begin, ends - begin), np.repeat(home[ends], ends - begin)


def _exchange(
    sent: np.ndarray, piece: np.ndarray, reader: np.ndarray, home: np.ndarray, ranks: int, rank: int
) -> tuple[RowExchange, dict[int, int]]:
    """The exchange of one row for each of the ``sent`` pieces, and by piece where its row arrives on ``rank``."""
    # Senders have the rows of their sent pieces in order; each reader gets the rows that it reads in order.
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
