"""The states of recurrent layers (linear attention, SSM) that travel between ranks.

A micro-batch runs in two *nano-batches*, ping and then pong. A *piece* is a run of a document's rows on one rank in one
nano-batch. A piece turns the state S before the piece into A·S + B. The *transition* A and the *own state* B are the
piece's *summary*. A rank with a piece gets the summaries of all earlier pieces of the document. With them it computes
the state before its own piece. In backward, gradients of states take the place of B, and pieces are in reverse order.

The first piece of a document sends no transition, since there is no state before it. The last piece sends no summary.
Example: a document has pieces on ranks 0, 1 and 2. Rank 0 sends B0 to ranks 1 and 2, and rank 1 sends A1 and B1 to rank
2. The state before piece 1 is B0, and the state before piece 2 is A1·B0 + B1.

An *exchange* is one transfer between all ranks. Array legend: P pieces in the direction's order; Q pairs of a piece and
a rank that reads the piece's summary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.plan.exchanges import Exchanges, Pieces, RowExchange, Segments
from distca.plan.recurrent.pieces import DocumentPieces, numbered
from distca.plan.sorting import expand


@dataclass(frozen=True)
class Link:
    """One piece of a document, in the list of pieces over which a rank computes states.

    Attributes:
        piece: the piece's number among this rank's pieces of the nano-batch, if this rank needs the state before the
            piece. It is -1 for pieces of other ranks and for the first piece of a document.
        state: row of B among the own states that arrived on this rank; -1 if the rank does not read the summary.
        transition: row of A among the transitions that arrived on this rank. It is -1 if the rank does not read the
            summary, and for the first piece of a document.
    """

    piece: int
    state: int
    transition: int


@dataclass(frozen=True)
class ChainRoute:
    """One rank's part of the states of one nano-batch, in one direction.

    Attributes:
        sends_state: numbers of this rank's pieces whose own state is sent, in the order of the exchange's source rows.
        sends_transition: numbers of this rank's pieces whose transition is sent, in the order of the exchange's source
            rows.
        states: the exchange of own states; each is one row.
        transitions: the exchange of transitions; each is one row.
        chains: for each document whose states this rank computes, the document's number and its links in this
            nano-batch.
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
        order: [P] index of each piece in ``DocumentPieces``.
        document: [P] document of each piece.
        home: [P] rank of each piece.
        first: [P] bool, whether the piece is the first of its document.
        last: [P] bool, whether the piece is the last of its document.
        piece: [Q] a piece whose summary is read.
        reader: [Q] the rank that reads the summary; it may be the piece's rank.
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
        """Returns all reads of a micro-batch."""
        order = np.arange(len(pieces))[:: -1 if backward else 1]
        first = (pieces.closes if backward else pieces.opens)[order]
        last = (pieces.opens if backward else pieces.closes)[order]
        home = pieces.shards.rank[order]
        return ChainReads(order, pieces.shards.document[order], home, first, last, *_readers(first, home, pieces.ranks))

    def sent(self, some: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the indices of pieces in ``some`` [P] bool that send their own state, and that send a transition."""
        return np.flatnonzero(some & ~self.last), np.flatnonzero(some & ~self.last & ~self.first)


def chain_routes(pieces: DocumentPieces, nano_batches: int, rank: int, backward: bool) -> tuple[ChainRoute, ...]:
    """Returns the parts of ``rank``, one for each nano-batch.

    Args:
        pieces: the pieces of the micro-batch.
        nano_batches: number of nano-batches.
        rank: the rank whose part is returned.
        backward: whether gradients of states travel, from a document's last piece to its first.
    """
    # In each nano-batch, "own" are this rank's pieces that need a state. "state_at" and "transition_at" have for each
    # piece the rows in which its B and A arrive on this rank. Pieces in "own" or "state_at" get links.
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
    """Returns [Q] pieces and [Q] ranks that read the pieces' summaries.

    A rank reads the summaries of all pieces that come before the rank's last piece of the document. Example: a
    document's pieces 0, 1, 2 and 3 lie on ranks 0, 1, 0 and 2. Rank 0 reads pieces 0 and 1, rank 1 reads piece 0, and
    rank 2 reads pieces 0, 1 and 2."""
    # Each pair of a document ("which") and a rank has one number, the "key". "ends" has for each key the rank's last
    # piece of the document. The rank reads pieces [begin, ends).
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
        piece: [Q] a piece whose row is read.
        reader: [Q] the rank that reads the row.
        home: [P] rank of each piece.
        ranks: number of ranks.
        rank: the rank whose part is returned.

    Returns:
        The rank's part of the exchange; and a dict with the row in which each piece's row arrives on the rank.
    """
    # "source" [P]: the row of each sent piece in the tensor that its rank sends; -1 for other pieces. Rows are sent and
    # received in the order of pieces.
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
