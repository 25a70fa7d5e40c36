"""The halo rows of recurrent layers (linear attention, SSM), which travel between ranks.

A micro-batch is computed in one or two parts, the *nano-batches* ping and pong. A *piece* is a range of a document's
rows (tokens) on one rank in one nano-batch. A recurrent layer begins with a causal convolution over ``width`` + 1 rows.
So a piece needs the ``width`` rows of its document before the piece: its *halo* rows.

In each nano-batch, ranks send the rows of this nano-batch that are halo rows of a piece in ping or pong. A rank
receives a row once, and "receives" its own rows too. Its pieces pick halo rows from all rows received so far.

Array legend: H pairs of a piece and one of its halo rows; G rows that one rank gives. Arrays are int64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.plan.exchanges import Exchanges, ReadRanges, RowExchange, Segments
from distca.plan.layout import overlaps
from distca.plan.recurrent.pieces import DocumentPieces, numbered
from distca.plan.sorting import expand


@dataclass(frozen=True)
class HaloRoute:
    """The halo rows that one rank sends, receives and reads in one nano-batch.

    Attributes:
        given: [G] this rank's rows of this nano-batch that are halo rows of a piece on any rank; ascending.
        exchange: which given rows travel between which ranks.
        picked: [pieces, width] index of each halo row among the rows received so far, those of ping first; -1 for a row
            before the document's start. The pieces are this rank's pieces in this nano-batch, in the order of rows,
            without first pieces of documents.
    """

    given: np.ndarray
    exchange: RowExchange
    picked: np.ndarray


def halo_routes(pieces: DocumentPieces, nano_batches: int, width: int, rank: int) -> tuple[HaloRoute, ...]:
    """Returns the route of ``rank`` for each nano-batch; ``width`` is the number of halo rows of a piece."""
    # [H] arrays: rank "sender" holds the halo row as its row number "row" in nano-batch "nano". A piece on rank
    # "receiver" reads it. For np.unique, a sender and a row become one number, sender · span + row.
    reader, source, position, slot = _reads(pieces, width)
    shards, ranks = pieces.shards, pieces.ranks
    sender, nano, receiver = shards.rank[source], pieces.nano[source], shards.rank[reader]
    row = shards.row[source] + position - shards.start[source]
    span = int(row.max(initial=0)) + 1
    routes, arrived_before = [], 0
    picked = [np.full((int((~pieces.opens[pieces.of_rank(rank, n)]).sum()), width), -1) for n in range(nano_batches)]
    for number in range(nano_batches):
        now = np.flatnonzero(nano == number)
        # given: each row that a receiver reads, once. at: the index in "given" of each halo row of this nano-batch.
        # place: the index of each given row among its sender's given rows. travels: each pair of a receiver and a given
        # row, once, in the order in which rows arrive.
        given, at = np.unique(sender[now] * span + row[now], return_inverse=True)
        place = numbered(given // span)
        travels, arrives = np.unique(receiver[now] * len(given) + at, return_inverse=True)
        to, what = np.divmod(travels, max(len(given), 1))
        destination = numbered(to)
        exchange = Exchanges(
            ReadRanges(given[what] // span, to, place[what], destination, np.ones_like(to)),
            np.bincount(given // span, minlength=ranks),
            rank,
        )
        arriving = int((to == rank).sum())
        routes.append((given[given // span == rank] % span, exchange.of(rank, arriving, *[Segments.none()] * 2)))
        # The indices of arrived rows go to "picked", for the rank's pieces in this nano-batch and in later ones.
        mine = np.flatnonzero(receiver[now] == rank)
        for later in range(number, nano_batches):
            some = mine[pieces.nano[reader[now[mine]]] == later]
            at_piece = _row_in_picked(pieces, rank, later)[pieces.number[reader[now[some]]]]
            picked[later][at_piece, slot[now[some]]] = arrived_before + destination[arrives[some]]
        arrived_before += arriving
    return tuple(HaloRoute(given, exchange, each) for (given, exchange), each in zip(routes, picked, strict=True))


def halo_rows(pieces: DocumentPieces, nano_batches: int, width: int) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Returns two arrays for each nano-batch: the rank that holds a halo row, and a rank that reads the row.

    A row is listed once for each rank that reads it, even if that rank holds it."""
    reader, source, position, _ = _reads(pieces, width)
    shards, ranks = pieces.shards, pieces.ranks
    row = shards.row[source] + position - shards.start[source]
    span = int(row.max(initial=0)) + 1
    pair = shards.rank[source] * ranks + shards.rank[reader]
    read = [np.unique((pair * span + row)[pieces.nano[source] == nano]) // span for nano in range(nano_batches)]
    return tuple(np.divmod(each, ranks) for each in read)


def _reads(pieces: DocumentPieces, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns [H] arrays "reader", "source", "position" and "slot".

    The piece "reader" needs the row at "position" of its document, which the piece "source" has. Example: width is 3
    and a piece starts at position 5. The piece needs the positions 2, 3 and 4, in the slots 0, 1 and 2."""
    # A reading piece needs the positions [first, start). ``overlaps`` finds the pieces that have some of these.
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
    """Returns the row of each piece in :attr:`HaloRoute.picked`; arbitrary for the first piece of a document."""
    continues = ~pieces.opens[pieces.of_rank(rank, nano)]
    return np.cumsum(continues) - continues
