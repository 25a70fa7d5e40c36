"""The states of recurrent layers that travel between ranks, and the *chain* in which each rank puts them together.

A *piece* is a run of a document's rows on one rank in one *nano-batch*, ping or pong (pieces.py). It turns the state S
before it into A·S + B. Its *transition* A and its *own state* B are its *summary*, which it can send before it knows S.
A rank with a piece gets the summaries of all earlier pieces of the document. It applies them in order, and so finds the
state before its piece. In backward the gradients of states go from a document's last piece to its first. So backward is
planned in the same way, with the pieces in reverse order.

The first piece of a document sends no transition, since there is no state before it. The last one sends no summary.
Example: a document has pieces on ranks 0, 1 and 2. Rank 0 sends B0 to ranks 1 and 2, and rank 1 sends A1 and B1 to rank
2. The state before piece 1 is B0, and the state before piece 2 is A1·B0 + B1.

An *exchange* is one transfer between all ranks. Array legend: P pieces in the direction's order, Q pairs of a piece and
a rank that reads its summary, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.plan.exchanges import Exchanges, Pieces, RowExchange, Segments
from distca.plan.recurrent.pieces import DocumentPieces, numbered
from distca.plan.sorting import expand


@dataclass(frozen=True)
class Link:
    """One piece of a document in the chain of a rank.

    The rank goes over the links in order. At a piece of its own it notes the state reached so far, which is the state
    before that piece. Then it applies the piece's summary.

    Attributes:
        piece: the piece's number among the rank's pieces of the nano-batch; -1 if it is on another rank. It is also -1
            for the document's first piece, which needs no state.
        state: row of B among the own states that arrived here; -1 if the rank needs no state behind this piece.
        transition: row of A among the transitions that arrived here; -1 for the document's first piece, and if the rank
            needs no state behind this piece.
    """

    piece: int
    state: int
    transition: int


@dataclass(frozen=True)
class ChainRoute:
    """One rank's part of the states of one nano-batch, in one direction.

    Attributes:
        sends_state: numbers of this rank's pieces whose own state is sent, in the order of the exchange's source rows.
        sends_transition: the same for transitions.
        states: the exchange of own states, one row each.
        transitions: the exchange of transitions, one row each.
        chains: for each document whose summaries this rank reads, its number and its links in this nano-batch. Links of
            the second nano-batch of the direction go on with the state that the first one reached.
    """

    sends_state: np.ndarray
    sends_transition: np.ndarray
    states: RowExchange
    transitions: RowExchange
    chains: tuple[tuple[int, tuple[Link, ...]], ...]


@dataclass(frozen=True)
class ChainReads:
    """The summaries that each rank reads in one direction.

    In backward all pieces are in reverse order, and a document's last piece counts as its first.

    Attributes:
        order: [P] index of each piece among the pieces by document and start.
        document: [P] document of each piece.
        home: [P] rank of each piece.
        first: [P] bool, whether the piece is the first of its document.
        last: [P] bool, whether the piece is the last of its document.
        piece: [Q] a piece whose summary is read; once for each rank that reads it.
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
        """All reads of a micro-batch, of summaries or in ``backward`` of gradients."""
        order = np.arange(len(pieces))[:: -1 if backward else 1]
        first = (pieces.closes if backward else pieces.opens)[order]
        last = (pieces.opens if backward else pieces.closes)[order]
        home = pieces.shards.rank[order]
        return ChainReads(order, pieces.shards.document[order], home, first, last, *_readers(first, home, pieces.ranks))

    def sent(self, some: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the pieces among ``some`` [P] bool that send their own state, and those that also send their
        transition, as indices."""
        return np.flatnonzero(some & ~self.last), np.flatnonzero(some & ~self.last & ~self.first)


def chain_routes(pieces: DocumentPieces, nano_batches: int, rank: int, backward: bool) -> tuple[ChainRoute, ...]:
    """The routes of ``rank``, one for each nano-batch.

    Args:
        pieces: the pieces of the micro-batch.
        nano_batches: number of its nano-batches.
        rank: the rank whose part is returned.
        backward: whether gradients of states travel, from a document's last piece to its first.
    """
    # Per nano-batch: "own" are this rank's pieces that need a state; "state_at" and "transition_at" tell, by piece, the
    # row in which its summary arrives here. A piece in any of them gets a link, in the order of pieces.
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
    """All pairs of a piece and a rank that reads its summary: [Q] pieces and [Q] ranks, by document and rank.

    A rank reads all pieces of a document before the last piece that it has itself. Example: a document's pieces lie on
    ranks 0, 1, 0 and 2. Rank 0 reads the first two, rank 1 the first one, and rank 2 the first three."""
    # Each pair of a document ("which") and a rank is one number, its "key". Pieces are sorted by key, and keep their
    # order. So the last one of a key is the rank's last piece of the document ("ends"), and it reads [begin, ends).
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
    """Plans an exchange with one row for each of the ``sent`` pieces.

    Args:
        sent: indices of pieces that send a row.
        piece: [Q] as in :class:`ChainReads`.
        reader: [Q] as in :class:`ChainReads`.
        home: [P] rank of each piece.
        ranks: number of ranks.
        rank: the rank whose part is returned.

    Returns:
        The rank's part; and by piece the row in which its summary arrives on the rank.
    """
    # "source" [P]: row of each sent piece in its home's tensor, in the order of pieces; -1 for other pieces. Each
    # reader gets its rows in the order of pieces, too.
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
