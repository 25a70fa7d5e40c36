"""The rows that a causal convolution reads before the first row of a piece: the piece's *halo*.

A halo of three rows may lie on one rank, or, where pieces are shorter than it, on three, and in both nano-batches. The
exchange of a nano-batch carries its rows to pieces of the same nano-batch and of the next. A rank gets every row once,
in one buffer for each nano-batch, and picks the halo of each piece from these buffers.

Array legend: P pieces, H halo rows of all pieces. All arrays are int64.
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
        given: [G] rows of this rank and nano-batch that some piece reads, ascending; the exchange's source tensor has
            these rows alone.
        exchange: brings given rows to the ranks whose pieces read them; each arrives once.
        picked: [pieces that continue a document, width] for each position before a piece of this nano-batch: its row
            among those that arrived, with ping's before pong's; -1 before a document's start. Pieces stand in the order
            of their rows.
    """

    given: np.ndarray
    exchange: RowExchange
    picked: np.ndarray


def halo_routes(pieces: DocumentPieces, nano_batches: int, width: int, rank: int) -> tuple[HaloRoute, ...]:
    """The routes of ``rank``, one for each nano-batch.

    Args:
        pieces: the pieces of the micro-batch.
        nano_batches: number of its nano-batches.
        width: rows that the convolution reads before a row; its kernel's size less one.
        rank: the rank whose part is wanted.
    """
    reader, source, position, slot = _reads(pieces, width)
    shards, ranks = pieces.shards, pieces.ranks
    sender, nano, server = shards.rank[source], pieces.nano[source], shards.rank[reader]
    row = shards.row[source] + position - shards.start[source]
    span = int(row.max(initial=0)) + 1
    routes, arrived_before = [], 0
    picked = [np.full((int((~pieces.opens[pieces.of_rank(rank, n)]).sum()), width), -1) for n in range(nano_batches)]
    for number in range(nano_batches):
        now = np.flatnonzero(nano == number)
        # Each (sender, row) is given once, as one number of ``given``, and each (server, given row) travels once. Rows
        # arrive on a server in the order of these numbers. Then every halo position that reads one notes where it is.
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
        mine = np.flatnonzero(server[now] == rank)
        for later in range(number, nano_batches):
            some = mine[pieces.nano[reader[now[mine]]] == later]
            at_piece = _among_continuing(pieces, rank, later)[pieces.number[reader[now[some]]]]
            picked[later][at_piece, slot[now[some]]] = arrived_before + destination[arrives[some]]
        arrived_before += arriving
    return tuple(HaloRoute(given, exchange, each) for (given, exchange), each in zip(routes, picked, strict=True))


def halo_rows(pieces: DocumentPieces, nano_batches: int, width: int) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Returns by nano-batch the home rank and the reading rank of each row that is read, once for each reader; [H]
    each."""
    reader, source, position, _ = _reads(pieces, width)
    shards, ranks = pieces.shards, pieces.ranks
    row = shards.row[source] + position - shards.start[source]
    span = int(row.max(initial=0)) + 1
    pair = shards.rank[source] * ranks + shards.rank[reader]
    read = [np.unique((pair * span + row)[pieces.nano[source] == nano]) // span for nano in range(nano_batches)]
    return tuple(np.divmod(each, ranks) for each in read)


def _reads(pieces: DocumentPieces, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns for every halo row of every piece, [H] each: the piece that reads it, the piece that has it, its position
    in the document, and its place among the ``width`` rows before the reader.

    Example: a width of 3 before a piece that starts at row 5 gives positions 2, 3 and 4 with places 0, 1 and 2."""
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
    """[N] for the pieces of a rank and nano-batch, the number of each among those that continue a document."""
    continues = ~pieces.opens[pieces.of_rank(rank, nano)]
    return np.cumsum(continues) - continues
