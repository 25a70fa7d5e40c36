"""Plans how ranks exchange the recurrent states of linear attention and SSM layers.

A micro-batch is computed in one or two parts, the *nano-batches*. A *piece* is a range of a document's rows on one rank
in one nano-batch. It turns the recurrent state S before the piece into A·S + B. A is the piece's *transition*, and B is
its *own state*. Both together are its *summary*.

A rank receives the summaries of all pieces of a document before its own last piece. It computes the states before its
own pieces. Example: a document has pieces 0, 1 and 2 on ranks 0, 1 and 2.

- Rank 0 sends B0 to ranks 1 and 2. Rank 1 sends A1 and B1 to rank 2.
- The state before piece 1 is B0. The state before piece 2 is A1·B0 + B1.

The first piece sends no transition, because the state before a document is zero. The last piece sends nothing. In
backward, pieces are in reverse order, and gradients of states take the place of states. There Aᵀ takes the place of A.

Array legend: P pieces, in reverse order for backward; Q pairs of a piece and a rank that reads the piece's summary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.plan.exchanges import Exchanges, ReadRanges, RowExchange, Segments
from distca.plan.recurrent.pieces import DocumentPieces, numbered
from distca.plan.sorting import expand


@dataclass(frozen=True)
class Link:
    """A piece, as one rank sees it.

    Attributes:
        piece: index of the piece among this rank's pieces of the nano-batch, if the rank computes the state before it.
            Else -1: for pieces of other ranks, and for the first piece of a document (in backward, the last).
        state: index of B among the own states that this rank receives; -1 if it does not receive B.
        transition: index of A among the transitions that this rank receives; -1 if it does not receive A.
    """

    piece: int
    state: int
    transition: int


@dataclass(frozen=True)
class ChainRoute:
    """The summaries that one rank sends and receives in one nano-batch, in forward or in backward.

    Attributes:
        sends_state: indices of this rank's pieces whose own state is sent, in the order of the sent tensor.
        sends_transition: indices of this rank's pieces whose transition is sent, in the order of the sent tensor.
        states: the transfer of own states, each as one row.
        transitions: the transfer of transitions, each as one row.
        chains: one entry for each document of which this rank computes a state: (the document's index, its links).
            Links are in the order in which states are computed. A piece of this nano-batch has a link if this rank
            receives the piece's summary, or computes the state before the piece. A document may have a chain in each
            nano-batch. The chain that is computed second begins with the state with which the first chain ended.
    """

    sends_state: np.ndarray
    sends_transition: np.ndarray
    states: RowExchange
    transitions: RowExchange
    chains: tuple[tuple[int, tuple[Link, ...]], ...]


@dataclass(frozen=True)
class ChainReads:
    """The summaries that each rank reads, to compute the states before its own pieces, in forward or in backward.

    Attributes:
        order: [P] index of each piece in ``DocumentPieces``.
        document: [P] document of each piece.
        home: [P] rank of each piece.
        first: [P] bool, whether the piece is the first of its document; in backward, whether it is the last.
        last: [P] bool, whether the piece is the last of its document; in backward, whether it is the first.
        piece: [Q] index of the piece whose summary is read.
        reader: [Q] the rank that reads the summary; it may be the piece's own rank.
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
        order = np.arange(len(pieces))[:: -1 if backward else 1]
        first = (pieces.closes if backward else pieces.opens)[order]
        last = (pieces.opens if backward else pieces.closes)[order]
        home = pieces.shards.rank[order]
        return ChainReads(order, pieces.shards.document[order], home, first, last, *_readers(first, home, pieces.ranks))

    def sent(self, some: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns indices of the pieces in ``some`` [P] whose own state is sent, and of those whose transition is."""
        return np.flatnonzero(some & ~self.last), np.flatnonzero(some & ~self.last & ~self.first)


def chain_routes(pieces: DocumentPieces, nano_batches: int, rank: int, backward: bool) -> tuple[ChainRoute, ...]:
    """Returns the route of ``rank`` for each nano-batch of a micro-batch with these ``pieces``."""
    # "own" is this rank's pieces that need the state before them. "state_at" and "transition_at" map pieces to the rows
    # in which this rank receives B and A.
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
    """Returns [Q] pieces, and [Q] ranks that read the pieces' summaries.

    A rank reads all pieces before its own last piece of the document. Example: the pieces 0, 1, 2 and 3 are on ranks 0,
    1, 0 and 2. Rank 0 reads pieces 0 and 1, rank 1 reads piece 0, and rank 2 reads pieces 0, 1 and 2."""
    # A document and a rank become one number, the "key". For each key, "ends" is the rank's last piece of the document.
    # The rank reads the pieces [begin, ends).
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
    """Plans a transfer in which each piece of ``sent`` sends one row to the ranks that read it.

    Returns the part of ``rank`` in it, and a dict from a piece to its row among the rows that ``rank`` receives."""
    # "source" is the row of each sent piece in the sender's tensor; -1 for other pieces.
    source = np.full(len(home), -1)
    source[sent] = numbered(home[sent])
    pairs = np.flatnonzero(source[piece] >= 0)
    what, to = piece[pairs], reader[pairs]
    destination = numbered(to, what)
    exchange = Exchanges(
        ReadRanges(home[what], to, source[what], destination, np.ones_like(what)),
        np.bincount(home[sent], minlength=ranks),
        rank,
    )
    mine = to == rank
    arrived = dict(zip(what[mine].tolist(), destination[mine].tolist(), strict=True))
    return exchange.of(rank, int(mine.sum()), Segments.none(), Segments.none()), arrived
