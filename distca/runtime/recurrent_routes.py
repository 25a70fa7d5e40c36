"""A rank's routes for recurrent layers (linear attention, SSM) as tensors on its device.

A *piece* is a run of a document's rows on one rank in one nano-batch (ping or pong, the two parts of a micro-batch).
Its convolution reads a few rows before it, the *halo*. It turns the state S before it into A·S + B, with the
*transition* A and the *own state* B, its *summary*. Halo rows and summaries travel between ranks.
``distca/plan/recurrent`` plans that in numpy; this file brings the plan to the device. ``RecurrentCall``
(recurrent_call.py) runs it.

Routes are made once per micro-batch and shared by all recurrent layers whose convolutions have the same size.
"""

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
    """The exchanges of one nano-batch in one direction: of summaries, or in backward of gradients and transitions.

    Attributes:
        sends_state: numbers of this rank's pieces whose own state is sent, in the order of the exchange's rows.
        sends_transition: the same for transitions.
        states: moves of own states, one row each.
        transitions: moves of transitions, one row each.
        chains: for each document whose summaries this rank reads, its number and a link for each piece up to this
            rank's last one. A link says where the piece's summary arrives, and whether the piece is this rank's.
    """

    sends_state: list[int]
    sends_transition: list[int]
    states: RowMoves
    transitions: RowMoves
    chains: tuple[tuple[int, tuple[Link, ...]], ...]

    @staticmethod
    def of(route: ChainRoute, ranks: int, device: Destination) -> StateRoutes:
        """Copies a route to ``device``."""
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
        pieces: each piece's rows, and the numbers of its halo rows among those that arrived, ping's before pong's.
        opens: for each piece, whether it is the first of its document.
        closes: for each piece, whether it is the last of its document.
        given: int64 home rows of this rank that are sent as halo.
        halo_to_pieces: moves of halo rows to the ranks whose pieces read them.
        halo_to_home: moves of their gradients back, which add up a row's gradients.
        forward: exchanges of summaries, which give the states before pieces.
        backward: exchanges that give the gradients of the states behind pieces.
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
            layouts: for each nano-batch, the ranks and rows on which documents lie.
            rank: this rank, numbered as in the layouts.
            halo_rows: number of rows that the convolution reads before a row.
            device: the rows' device, or an upload to it. With an upload the tensors have no values until it is sent.
        """
        with uploading(device) as upload:
            arrived, routes = 0, []
            for route in piece_routes(layouts, rank, halo_rows):
                arrived += route.halo.exchange.destination_rows
                routes.append(_of(route, arrived, upload))
            return tuple(routes)

    def with_backward(self, other: RecurrentRoutes) -> RecurrentRoutes:
        """Returns these routes with the backward exchanges of ``other``.

        With pipeline stages, forward and backward of a micro-batch run in different phases, beside different
        micro-batches of other stages. This rank's own rows are the same in both."""
        return replace(self, halo_to_home=other.halo_to_home, backward=other.backward)


def _of(route: PieceRoute, arrived: int, device: Destination) -> RecurrentRoutes:
    """The routes of one nano-batch.

    ``arrived`` is the number of halo rows that this rank gets up to this nano-batch. A halo position before the start
    of its document gets this number, the index of a row of zeros behind the arrived rows."""
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
