"""The routes of a rank's pieces, their halo and their states, as tensors on its device.

They are made once per micro-batch and used by all recurrent layers whose convolutions have the same size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from distca.device.host_to_device import Destination, to_device, uploading
from distca.plan import Layout
from distca.plan.recurrent.chains import ChainRoute, Link
from distca.plan.recurrent.routes import PieceRoute, piece_routes
from distca.recurrent.convolution import PieceRows
from distca.transport import RowMoves


@dataclass(frozen=True)
class StateRoutes:
    """The exchanges of summaries of one nano-batch in one direction.

    Attributes:
        sends_state: pieces of this rank and nano-batch whose own state is sent, in the exchange's order.
        sends_transition: pieces whose transition is sent.
        states: moves of own states.
        transitions: moves of transitions.
        chains: (document, its links in this nano-batch) for each document that this rank reads.
    """

    sends_state: list[int]
    sends_transition: list[int]
    states: RowMoves
    transitions: RowMoves
    chains: tuple[tuple[int, tuple[Link, ...]], ...]

    @staticmethod
    def of(route: ChainRoute, ranks: int, device: Destination) -> StateRoutes:
        """Brings a route to ``device``."""
        return StateRoutes(
            route.sends_state.tolist(),
            route.sends_transition.tolist(),
            RowMoves.there_and_back(route.states, ranks, device)[0],
            RowMoves.there_and_back(route.transitions, ranks, device)[0],
            route.chains,
        )


@dataclass(frozen=True)
class RecurrentRoutes:
    """Everything a rank needs to run one nano-batch of a recurrent layer.

    Attributes:
        pieces: where the pieces lie, and which halo rows come before them; ping's halo rows are counted first.
        opens: for each piece, whether it is the first of its document.
        closes: for each piece, whether it is the last of its document.
        given: int64 rows of this rank that are sent as halo.
        halo_to_pieces: moves of halo rows to the ranks whose pieces read them.
        halo_to_home: moves of their gradients back, added up.
        forward: exchanges of the states before pieces.
        backward: exchanges of the gradients of the states behind pieces.
    """

    pieces: PieceRows
    opens: list[bool]
    closes: list[bool]
    given: torch.Tensor
    halo_to_pieces: RowMoves
    halo_to_home: RowMoves
    forward: StateRoutes
    backward: StateRoutes

    @staticmethod
    def of(layouts: Sequence[Layout], rank: int, halo_rows: int, device: Destination) -> tuple[RecurrentRoutes, ...]:
        """The routes of a micro-batch, one for each nano-batch.

        Args:
            layouts: the layouts of the nano-batches.
            rank: this rank, numbered as in the layouts.
            halo_rows: rows that the layers' convolution reads before a row.
            device: where the rows live, or an upload to it; then the routes are ready once the upload was sent.
        """
        with uploading(device) as upload:
            arrived, routes = 0, []
            for route in piece_routes(layouts, rank, halo_rows):
                arrived += route.halo.exchange.destination_rows
                routes.append(_of(route, arrived, upload))
            return tuple(routes)

    def with_backward(self, other: RecurrentRoutes) -> RecurrentRoutes:
        """Returns these routes with the backward exchanges of another phase.

        In that phase this rank has the same rows, and other stages have other ones."""
        return replace(self, halo_to_home=other.halo_to_home, backward=other.backward)


def _of(route: PieceRoute, arrived: int, device: Destination) -> RecurrentRoutes:
    """The routes of one nano-batch. ``arrived`` is the number of halo rows of this nano-batch and the one before.
    Positions before a document's start pick the row with this index, which is zero."""
    picked = np.where(route.halo.picked < 0, arrived, route.halo.picked)
    opens = route.opens.tolist()
    return RecurrentRoutes(
        PieceRows(route.spans, [not each for each in opens], to_device(picked, device)),
        opens,
        route.closes.tolist(),
        to_device(route.halo.given, device),
        *RowMoves.there_and_back(route.halo.exchange, route.ranks, device),
        StateRoutes.of(route.forward, route.ranks, device),
        StateRoutes.of(route.backward, route.ranks, device),
    )
