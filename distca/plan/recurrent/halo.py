"""The halo rows of recurrent layers (linear attention, SSM), which travel between ranks.

A micro-batch is computed in one or two parts, the *nano-batches* ping and pong. A *piece* is a range of a document's
rows on one rank in one nano-batch. A recurrent layer begins with a causal convolution over ``width`` + 1 rows. So a
piece needs the ``width`` rows of its document before the piece: its *halo* rows. Halo rows may be on several ranks, and
in both nano-batches.

In each nano-batch, ranks send the rows of this nano-batch that other pieces need. Rows of ping also go to ranks with
pieces in pong. A rank receives a row once, and its pieces pick their halo rows from all rows received so far.

Array legend: P pieces of all ranks; H pairs of a piece and one of its halo rows; G rows of one rank. Arrays are int64.
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
    """The halo rows that one rank sends, receives and reads in one nano-batch.

    Attributes:
        given: [G] rows of this rank and nano-batch that are halo rows of any piece; ascending.
        exchange: the transfer of given rows between all ranks.
        picked: [pieces, width] for each of this rank's pieces that is not the first of its document: the index of each
            halo row among the rows received so far. Ping's rows come first. The index is -1 before the document's
            start. Pieces are in the order of rows.
    """

    given: np.ndarray
    exchange: RowExchange
    picked: np.ndarray


def halo_routes(pieces: DocumentPieces, nano_batches: int, width: int, rank: int) -> tuple[HaloRoute, ...]:
    """Returns the route of ``rank`` for each nano-batch.

    Args:
        pieces: the pieces of the micro-batch.
        nano_batches: number of nano-batches.
        width: number of rows that the convolution reads before each row.
        rank: the rank.
    """
    # [H] arrays: "sender" and "row" are the rank and row of a halo row, "nano" is its nano-batch, and "server" is the
    # rank that reads it. For np.unique, a sender and a row become one number, sender · span + row.
    reader, source, position, slot = _reads(pieces, width)
    shards, ranks = pieces.shards, pieces.ranks
    sender, nano, server = shards.rank[source], pieces.nano[source], shards.rank[reader]
    row = shards.row[source] + position - shards.start[source]
    span = int(row.max(initial=0)) + 1
    routes, arrived_before = [], 0
    picked = [np.full((int((~pieces.opens[pieces.of_rank(rank, n)]).sum()), width), -1) for n in range(nano_batches)]
    for number in range(nano_batches):
        now = np.flatnonzero(nano == number)
        # given: the different rows that any server reads. at [H]: the index of each halo row in "given". place: the
        # index of each given row among those of its sender. travels: the different pairs of a server and a given row,
        # in the order in which rows arrive.
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
        # The arrived rows are entered into "picked", for the rank's pieces in this nano-batch and in later ones.
        mine = np.flatnonzero(server[now] == rank)
        for later in range(number, nano_batches):
            some = mine[pieces.nano[reader[now[mine]]] == later]
            at_piece = _row_in_picked(pieces, rank, later)[pieces.number[reader[now[some]]]]
            picked[later][at_piece, slot[now[some]]] = arrived_before + destination[arrives[some]]
        arrived_before += arriving
    return tuple(HaloRoute(given, exchange, each) for (given, exchange), each in zip(routes, picked, strict=True))


def halo_rows(pieces: DocumentPieces, nano_batches: int, width: int) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Returns, for each nano-batch, two arrays over halo rows: the rank that holds the row, and a rank that reads it.

    A row is listed once for each reading rank, even if the rank that holds the row is the one that reads."""
    reader, source, position, _ = _reads(pieces, width)
    shards, ranks = pieces.shards, pieces.ranks
    row = shards.row[source] + position - shards.start[source]
    span = int(row.max(initial=0)) + 1
    pair = shards.rank[source] * ranks + shards.rank[reader]
    read = [np.unique((pair * span + row)[pieces.nano[source] == nano]) // span for nano in range(nano_batches)]
    return tuple(np.divmod(each, ranks) for each in read)


def _reads(pieces: DocumentPieces, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns [H] arrays "reader", "source", "position" and "slot".

    The piece "reader" needs the row at "position", which the piece "source" of the same document has. Example: width is
    3 and a piece starts at position 5. The piece needs the positions 2, 3 and 4, in the slots 0, 1 and 2."""
    # [first, start): the positions that each reading piece needs. Pieces that have some of these positions are found,
    # and each position becomes one element of the result.
    shards = pieces.shards
    readers = np.flatnonzero(~pieces.opens)
    start = shards.start[readers]
    first = np.maximum(start - width, 0)
    found, source, rows = overlaps(shards.document[readers], first, start, shards)
    begin = np.maximum(first[found], shards.start[source])
    position = expand(begin, rows)
    found, source = np.repeat(found, rows), np.repeat(source, rows)
    return readers[found], source, position, position - start[found] + width


def _row_in_picked(pieces: DocumentPieces, rank: int, nano: int) -> np.ndarray:
    """Returns the row in :attr:`HaloRoute.picked` of each piece of a rank and nano-batch.

    The results for pieces that are the first of their document have no meaning."""
    continues = ~pieces.opens[pieces.of_rank(rank, nano)]
    return np.cumsum(continues) - continues
