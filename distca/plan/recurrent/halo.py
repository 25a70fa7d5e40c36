"""The halo rows of recurrent layers (linear attention, SSM): which rows they are, and how they travel between ranks.

A micro-batch runs in two *nano-batches*, ping and then pong. A *piece* is a run of a document's rows on one rank in one
nano-batch. The core of a recurrent layer begins with a causal convolution, which reads for each row the ``width`` rows
before it. So a piece's first rows need up to ``width`` rows of the document before the piece: the piece's *halo* rows.
Halo rows may lie on several ranks and in both nano-batches.

Each nano-batch has one *exchange*, a transfer between all ranks, which brings rows of this nano-batch to the pieces
that read them. Ping's rows also go to pieces of pong. A rank gets each row once, even if several pieces read the row.
Each piece picks its halo rows from all rows that have arrived; ping's rows come before pong's.

Array legend: P pieces; H pairs of a piece and one of its halo rows. Arrays are int64.
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
    """One rank's part of the halo rows of one nano-batch.

    Attributes:
        given: [G] rows of this rank and nano-batch that are halo rows of some piece on any rank; ascending.
        exchange: moves of the given rows to the ranks whose pieces read them.
        picked: [pieces, width] for this rank's pieces in this nano-batch that are not the first of their document, in
            the order of rows. An entry is the place of one of the ``width`` rows before the piece, among the rows that
            arrived on this rank. It is -1 before the document's start.
    """

    given: np.ndarray
    exchange: RowExchange
    picked: np.ndarray


def halo_routes(pieces: DocumentPieces, nano_batches: int, width: int, rank: int) -> tuple[HaloRoute, ...]:
    """Returns the parts of ``rank``, one for each nano-batch.

    Args:
        pieces: the pieces of the micro-batch.
        nano_batches: number of nano-batches.
        width: number of rows that the convolution reads before each row, which is its kernel's size less one.
        rank: the rank whose part is returned.
    """
    # [H] each: "sender" and "row" say where the halo row lies, "nano" in which nano-batch it travels, and "server"
    # which rank reads it. For np.unique, sender and row become one number: sender · span + row.
    reader, source, position, slot = _reads(pieces, width)
    shards, ranks = pieces.shards, pieces.ranks
    sender, nano, server = shards.rank[source], pieces.nano[source], shards.rank[reader]
    row = shards.row[source] + position - shards.start[source]
    span = int(row.max(initial=0)) + 1
    routes, arrived_before = [], 0
    picked = [np.full((int((~pieces.opens[pieces.of_rank(rank, n)]).sum()), width), -1) for n in range(nano_batches)]
    for number in range(nano_batches):
        now = np.flatnonzero(nano == number)
        # "given": the different (sender, row) of this nano-batch; "at": the place of each halo row in "given". Each
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
        # Fills in "picked" of the rank's pieces in this nano-batch and the next.
        mine = np.flatnonzero(server[now] == rank)
        for later in range(number, nano_batches):
            some = mine[pieces.nano[reader[now[mine]]] == later]
            at_piece = _among_continuing(pieces, rank, later)[pieces.number[reader[now[some]]]]
            picked[later][at_piece, slot[now[some]]] = arrived_before + destination[arrives[some]]
        arrived_before += arriving
    return tuple(HaloRoute(given, exchange, each) for (given, exchange), each in zip(routes, picked, strict=True))


def halo_rows(pieces: DocumentPieces, nano_batches: int, width: int) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Returns for each nano-batch the rank that holds and the rank that reads each halo row, [N] each.

    A row counts once for each rank that reads it, even if the reader holds the row."""
    reader, source, position, _ = _reads(pieces, width)
    shards, ranks = pieces.shards, pieces.ranks
    row = shards.row[source] + position - shards.start[source]
    span = int(row.max(initial=0)) + 1
    pair = shards.rank[source] * ranks + shards.rank[reader]
    read = [np.unique((pair * span + row)[pieces.nano[source] == nano]) // span for nano in range(nano_batches)]
    return tuple(np.divmod(each, ranks) for each in read)


def _reads(pieces: DocumentPieces, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns four arrays over the halo rows of all pieces, [H] each.

    They are the piece that reads the row, the piece that has the row, the row's position in the document, and the row's
    place among the ``width`` rows before the reading piece. Example: the width is 3 and a piece starts at position 5.
    The piece reads positions 2, 3 and 4, which have places 0, 1 and 2."""
    # "readers" are the pieces that are not the first of their document; [first, start) are the positions of their halo
    # rows. Each overlap of such a range with a piece is then written out row by row.
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
    """Returns for each piece of a rank and nano-batch the number of earlier pieces there that continue a document."""
    continues = ~pieces.opens[pieces.of_rank(rank, nano)]
    return np.cumsum(continues) - continues
