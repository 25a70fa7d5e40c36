"""The halo of pieces: the rows before a piece that its causal convolution reads, and the ways on which they travel.

A *piece* is a run of a document's rows on one rank in one *nano-batch*, ping or pong (pieces.py). Before the recurrence
of a layer comes a convolution, which reads for each row the ``width`` rows before it. For a piece's first rows some of
these belong to earlier pieces: the piece's *halo*. With a width of three the halo may lie on one rank. If pieces are
short it may lie on three, and in both nano-batches.

Each nano-batch has one *exchange*, a transfer between all ranks. It brings the nano-batch's rows to pieces that read
them; ping's rows also go to pieces of pong. A rank gets each row once, even if several of its pieces read it. The rows
that arrive lie one after the other, ping's before pong's, and each piece picks its halo from them.

Array legend: P pieces, H halo rows of all pieces, once for each piece. All arrays are int64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.plan.exchanges import Exchanges, Pieces, RowExchange, Segments
from distca.plan.layout import overlaps
from distca.plan.recurrent.pieces import DocumentPieces, numbered
from distca.plan.sorting import expand


@dataclass(frozen=True)
class HaloRoute:
    """One rank's part of the halo of one nano-batch.

    Attributes:
        given: [G] rows of this rank and nano-batch that some piece, on any rank, has in its halo; ascending. They are
            the exchange's source tensor.
        exchange: moves of given rows to the ranks whose pieces read them.
        picked: [pieces that continue a document, width]. For each such piece of this rank and nano-batch, in the order
            of rows, and each of the ``width`` positions before it: the number of that row among the rows that arrived
            here. -1 stands for a position before the document's start.
    """

    given: np.ndarray
    exchange: RowExchange
    picked: np.ndarray


def halo_routes(pieces: DocumentPieces, nano_batches: int, width: int, rank: int) -> tuple[HaloRoute, ...]:
    """The routes of ``rank``, one for each nano-batch.

    Args:
        pieces: the pieces of the micro-batch.
        nano_batches: number of its nano-batches.
        width: number of rows that the convolution reads before a row; its kernel's size less one.
        rank: the rank whose part is returned.
    """
    # For each halo row of each piece, [H] each: the rank that sends it and its row there, the nano-batch in which it is
    # sent, and the rank that reads it. (rank, row) is one number for np.unique, rank · span + row.
    reader, source, position, slot = _reads(pieces, width)
    shards, ranks = pieces.shards, pieces.ranks
    sender, nano, server = shards.rank[source], pieces.nano[source], shards.rank[reader]
    row = shards.row[source] + position - shards.start[source]
    span = int(row.max(initial=0)) + 1
    routes, arrived_before = [], 0
    picked = [np.full((int((~pieces.opens[pieces.of_rank(rank, n)]).sum()), width), -1) for n in range(nano_batches)]
    for number in range(nano_batches):
        now = np.flatnonzero(nano == number)
        # "given": the different (sender, row) of this nano-batch; "at": the number of each halo row among them. Each
        # pair of a server and a given row travels once ("travels"), and rows arrive on a server in this order.
        given, at = np.unique(sender[now] * span + row[now], return_inverse=True)
        place = numbered(given // span)
        travels, arrives = np.unique(server[now] * len(given) + at, return_inverse=True)
        to, what = np.divmod(travels, max(len(given), 1))
        destination = numbered(to)
        exchange = Exchanges(
            Pieces(given[what] // span, to, place[what], destination, np.ones_like(to)),
            np.bincount(given // span, minlength=ranks),
            rank,
        )
        arriving = int((to == rank).sum())
        routes.append((given[given // span == rank] % span, exchange.of(rank, arriving, *[Segments.none()] * 2)))
        # The rank's own pieces, of this nano-batch and of the next, note where each of their halo rows has arrived.
        mine = np.flatnonzero(server[now] == rank)
        for later in range(number, nano_batches):
            some = mine[pieces.nano[reader[now[mine]]] == later]
            at_piece = _among_continuing(pieces, rank, later)[pieces.number[reader[now[some]]]]
            picked[later][at_piece, slot[now[some]]] = arrived_before + destination[arrives[some]]
        arrived_before += arriving
    return tuple(HaloRoute(given, exchange, each) for (given, exchange), each in zip(routes, picked, strict=True))


def halo_rows(pieces: DocumentPieces, nano_batches: int, width: int) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Returns by nano-batch the home rank and the reading rank of each row that is sent in it, [N] each.

    A row counts once for each rank that reads it, even if the reader is its home. ``traffic.py`` counts with it."""
    reader, source, position, _ = _reads(pieces, width)
    shards, ranks = pieces.shards, pieces.ranks
    row = shards.row[source] + position - shards.start[source]
    span = int(row.max(initial=0)) + 1
    pair = shards.rank[source] * ranks + shards.rank[reader]
    read = [np.unique((pair * span + row)[pieces.nano[source] == nano]) // span for nano in range(nano_batches)]
    return tuple(np.divmod(each, ranks) for each in read)


def _reads(pieces: DocumentPieces, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns four arrays over the halo rows of all pieces, [H] each.

    They are the piece that reads the row, the piece that has it, its position in the document, and its place among the
    ``width`` rows before the reader. Example: the width is 3 and a piece starts at position 5. It reads the positions
    2, 3 and 4, with the places 0, 1 and 2."""
    # "readers" are the pieces that continue a document, and [first, start) the range of their halo. Each overlap of
    # such a range with a piece is then written out row by row.
    shards = pieces.shards
    readers = np.flatnonzero(~pieces.opens)
    start = shards.start[readers]
    first = np.maximum(start - width, 0)
    found, source, rows = overlaps(shards.document[readers], first, start, shards)
    begin = np.maximum(first[found], shards.start[source])
    position = expand(begin, rows)
    found, source = np.repeat(found, rows), np.repeat(source, rows)
    return readers[found], source, position, position - start[found] + width


def _among_continuing(pieces: DocumentPieces, rank: int, nano: int) -> np.ndarray:
    """[N] for each piece of a rank and nano-batch, the number of pieces before it that continue a document.

    So a piece that continues a document has its number among such pieces."""
    continues = ~pieces.opens[pieces.of_rank(rank, nano)]
    return np.cumsum(continues) - continues
