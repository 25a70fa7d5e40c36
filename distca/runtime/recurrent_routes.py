"""Copies the planned transfers of recurrent layers (linear attention, SSM) to the rank's device, as index tensors.

A micro-batch is computed in one or two parts, the *nano-batches* ping and pong. A *piece* is a range of a document's
rows on one rank in one nano-batch. ``recurrent_call.py`` sends two things between ranks:

- halo rows: the few rows of a document right before a piece, which the piece's convolution reads.
- summaries: a piece turns the recurrent state S before it into A·S + B. A is its *transition*, and B its *own state*.
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
    """One nano-batch's transfers of summaries, forward or backward.

    In backward, gradients of states travel in place of own states.

    Attributes:
        sends_state: indices of this rank's pieces whose own state is sent, in sending order.
        sends_transition: indices of this rank's pieces whose transition is sent, in sending order.
        states, transitions: moves of own states and of transitions; each is one row.
        chains: one entry for each document of which this rank computes a state: the document's index, and its chain.
            The chain has a link for each piece of this nano-batch from which these states are computed, in order. A
            link says in which received rows A and B of the piece lie. In the nano-batch that is computed second (in
            backward, ping), the chain begins with the state with which the document's chain ended in the other.
    """

    sends_state: list[int]
    sends_transition: list[int]
    states: RowMoves
    transitions: RowMoves
    chains: tuple[tuple[int, tuple[Link, ...]], ...]

    @staticmethod
    def of(route: ChainRoute, ranks: int, device: Destination) -> StateRoutes:
        return StateRoutes(
            route.sends_state.tolist(),
            route.sends_transition.tolist(),
            RowMoves.there_and_back(route.states, ranks, device)[0],
            RowMoves.there_and_back(route.transitions, ranks, device)[0],
            route.chains,
        )


@dataclass(frozen=True)
class RecurrentRoutes:
    """One rank's pieces and transfers for one nano-batch.

    Attributes:
        pieces: each piece's rows, and the indices of its halo rows. In pong, the indices count the halo rows that
            arrived in ping, and then those that arrived in pong.
        opens, closes: for each piece, whether it is the first and whether it is the last of its document.
        given: int64 indices of this rank's rows in this nano-batch that are halo rows of a piece. The piece may be on
            any rank, in this nano-batch or a later one.
        halo_to_pieces: moves of the given rows to the ranks of the pieces that read them.
        halo_to_home: moves of the given rows' gradients back; gradients of one row are added up.
        forward, backward: transfers of summaries.
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
        """Returns the routes of a micro-batch, one for each nano-batch.

        Args:
            layouts: for each nano-batch, the documents' rows on each rank.
            rank: this rank's number in the layouts.
            halo_rows: number of rows that the convolution reads before each row.
            device: a device, or an upload, which copies several tensors at once. Before the upload is sent, the tensors
                have no values yet.
        """
        with uploading(device) as upload:
            arrived, routes = 0, []
            for route in piece_routes(layouts, rank, halo_rows):
                arrived += route.halo.exchange.destination_rows
                routes.append(_of(route, arrived, upload))
            return tuple(routes)

    def with_backward(self, other: RecurrentRoutes) -> RecurrentRoutes:
        """Returns these routes with the backward transfers of ``other``.

        With pipeline stages, the transfers of a micro-batch also carry rows of micro-batches on other stages. While
        this stage runs the backward, other stages run other micro-batches than during the forward."""
        return replace(self, halo_to_home=other.halo_to_home, backward=other.backward)


def _of(route: PieceRoute, arrived: int, device: Destination) -> RecurrentRoutes:
    """Returns the routes of one nano-batch; ``arrived`` halo rows arrive in this nano-batch and earlier ones together.

    Before a document's first row, the convolution reads rows of zeros. Their index is -1 in ``route``, and ``arrived``
    in the result."""
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
