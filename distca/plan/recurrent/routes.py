"""The rows that a rank computes in a recurrent layer (linear attention, SSM), and what it sends and receives for them.

A micro-batch is computed in one or two parts, the *nano-batches*. A *piece* is a range of a document's rows on one rank
in one nano-batch. Two things travel between ranks:

- *halo* rows: the rows just before a piece, which the piece's convolution reads too.
- *summaries*: a piece turns the recurrent state S before it into A·S + B. The piece's summary is A and B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca.plan.layout import Layout
from distca.plan.recurrent.chains import ChainRoute, chain_routes
from distca.plan.recurrent.halo import HaloRoute, halo_routes
from distca.plan.recurrent.pieces import DocumentPieces


@dataclass(frozen=True)
class PieceRoute:
    """One rank's [P] pieces of one nano-batch, in the order of their rows.

    Attributes:
        ranks: number of ranks in the layouts.
        begin, end: [P] int64 first row of each piece in the rank's tensor, and one past its last row.
        opens, closes: [P] bool, whether the piece is the first of its document, and whether it is the last.
        halo: the halo rows that this rank sends, receives and reads.
        forward, backward: the summaries that this rank sends and receives. In backward, S is the gradient of the state
            behind a piece.
    """

    ranks: int
    begin: np.ndarray
    end: np.ndarray
    opens: np.ndarray
    closes: np.ndarray
    halo: HaloRoute
    forward: ChainRoute
    backward: ChainRoute

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        return list(zip(self.begin.tolist(), self.end.tolist(), strict=True))


def piece_routes(layouts: Sequence[Layout], rank: int, halo_rows: int) -> tuple[PieceRoute, ...]:
    """Returns the pieces of ``rank`` in each nano-batch.

    Args:
        layouts: for each nano-batch, which rank holds each row of a document.
        halo_rows: number of earlier rows that the convolution reads for each row.
    """
    pieces = DocumentPieces.of(layouts)
    nano_batches = len(layouts)
    halo = halo_routes(pieces, nano_batches, halo_rows, rank)
    forward, backward = (chain_routes(pieces, nano_batches, rank, backward) for backward in (False, True))
    routes = []
    for nano in range(nano_batches):
        mine = pieces.of_rank(rank, nano)
        shards = pieces.shards
        begin = shards.row[mine]
        end = begin + shards.stop[mine] - shards.start[mine]
        borders = pieces.opens[mine], pieces.closes[mine]
        routes.append(PieceRoute(pieces.ranks, begin, end, *borders, halo[nano], forward[nano], backward[nano]))
    return tuple(routes)
