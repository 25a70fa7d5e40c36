"""One rank's part of a micro-batch in a recurrent layer (linear attention, SSM): its pieces, their halo and states.

A *piece* is a run of a document's rows on one rank in one *nano-batch*, ping or pong. Its convolution reads a few rows
before it, the *halo*. Its recurrence begins with the state that the pieces before it reach. Halo rows and states travel
between ranks. Nothing is scheduled, since each piece is computed where it lies; so all of it follows from the layouts.
``runtime/recurrent_routes.py`` brings these routes to the device.
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
    """One rank's part of one nano-batch.

    Array legend: P pieces of this rank and nano-batch, in the order of their rows.

    Attributes:
        ranks: number of ranks that hold rows.
        begin: [P] int64 first row of each piece.
        end: [P] int64 one past the last row of each piece.
        opens: [P] bool, whether the piece is the first of its document.
        closes: [P] bool, whether the piece is the last of its document.
        halo: moves of halo rows that this nano-batch sends, and the halo of its pieces.
        forward: moves of summaries, which give the states before these pieces.
        backward: the same for the gradients of the states behind these pieces.
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
        """(First row, one past the last) of each piece."""
        return list(zip(self.begin.tolist(), self.end.tolist(), strict=True))


def piece_routes(layouts: Sequence[Layout], rank: int, halo_rows: int) -> tuple[PieceRoute, ...]:
    """The parts of ``rank`` in a micro-batch, one for each nano-batch.

    Args:
        layouts: for each nano-batch, the ranks and rows on which documents lie.
        rank: the rank whose part is returned.
        halo_rows: number of rows that a layer's convolution reads before a row; its kernel's size less one.
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
