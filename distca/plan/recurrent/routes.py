"""One rank's part of a micro-batch in a recurrent layer: its pieces, their halo and their states.

All of it follows from the layouts. Nothing is scheduled: each piece is computed where it lies.
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
    """One rank's part of one half. Array legend: P pieces of this rank and half, in the order of their rows.

    Attributes:
        ranks: number of home ranks.
        begin: [P] int64 first row of each piece.
        end: [P] int64 one past its last row.
        opens: [P] bool, the first piece of its document.
        closes: [P] bool, the last piece of its document.
        halo: the rows before its pieces.
        forward: the states before its pieces.
        backward: the gradients of the states behind its pieces.
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
    """The parts of ``rank`` in a micro-batch's one or two halves.

    Args:
        layouts: of the micro-batch's halves.
        rank: whose part is wanted.
        halo_rows: rows that a layer's convolution reads before a row; its kernel's size less one.
    """
    pieces = DocumentPieces.of(layouts)
    halves = len(layouts)
    halo = halo_routes(pieces, halves, halo_rows, rank)
    forward, backward = (chain_routes(pieces, halves, rank, backward) for backward in (False, True))
    routes = []
    for half in range(halves):
        mine = pieces.of_rank(rank, half)
        shards = pieces.shards
        begin = shards.row[mine]
        end = begin + shards.stop[mine] - shards.start[mine]
        borders = pieces.opens[mine], pieces.closes[mine]
        routes.append(PieceRoute(pieces.ranks, begin, end, *borders, halo[half], forward[half], backward[half]))
    return tuple(routes)
