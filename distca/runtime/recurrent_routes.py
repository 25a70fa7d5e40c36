"""A rank's pieces, their halo and their states in device form. They are made once per micro-batch and used by all
recurrent layers whose convolutions have the same size."""

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
    """Exchanges of summaries of one half in one direction.

    Attributes:
        sends_state: pieces of this rank and half whose own state is sent, in the exchange's order.
        sends_transition: the same of those whose transition is sent.
        states: moves of own states.
        transitions: moves of transitions.
        chains: (document, its links in this half), of each document that this rank reads.
    """

    sends_state: list[int]
    sends_transition: list[int]
    states: RowMoves
    transitions: RowMoves
    chains: tuple[tuple[int, tuple[Link, ...]], ...]

    @staticmethod
    def of(route: ChainRoute, ranks: int, device: Destination) -> StateRoutes:
        """Bring a route to ``device``."""
        return StateRoutes(
            route.sends_state.tolist(),
            route.sends_transition.tolist(),
            RowMoves.there_and_back(route.states, ranks, device)[0],
            RowMoves.there_and_back(route.transitions, ranks, device)[0],
            route.chains,
        )


@dataclass(frozen=True)
class RecurrentRoutes:
    """Everything a rank needs to run one half of a recurrent layer.

    Attributes:
        pieces: where they lie, and the rows before them among ping's halo rows and then this half's.
        opens: for each piece, whether it is the first of its document.
        closes: for each piece, whether it is the last of its document.
        given: int64 rows of this rank that are sent as halo.
        halo_to_pieces: moves of halo rows to the ranks whose pieces read them.
        halo_to_home: moves of their gradients back, added up.
        forward: states before pieces.
        backward: gradients of states behind them.
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
        """The routes of a micro-batch's halves.

        Args:
            layouts: of the halves.
            rank: this rank, numbered as in the layouts.
            halo_rows: rows that the layers' convolution reads before a row.
            device: where the rows live; with an upload the routes are ready once that was sent.
        """
        with uploading(device) as upload:
            arrived, routes = 0, []
            for route in piece_routes(layouts, rank, halo_rows):
                arrived += route.halo.exchange.destination_rows
                routes.append(_of(route, arrived, upload))
            return tuple(routes)

    def with_backward(self, other: RecurrentRoutes) -> RecurrentRoutes:
        """Returns these routes with the exchanges of another phase in backward, in which this rank has the same rows
        and other stages have other ones."""
        return replace(self, halo_to_home=other.halo_to_home, backward=other.backward)


def _of(route: PieceRoute, arrived: int, device: Destination) -> RecurrentRoutes:
    """``arrived``: halo rows of this half and of the one before. The row past them is what documents begin with."""
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
