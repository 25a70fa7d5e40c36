"""The rows and states that a rank exchanges for recurrent layers (linear attention, SSM), as tensors on its device.

A micro-batch runs in two *nano-batches*, ping and then pong. A *piece* is a run of a document's rows on one rank in one
nano-batch. Two things travel between ranks:

- *halo* rows: the convolution of a piece's first rows reads a few rows of the document before the piece.
- *summaries*: a piece turns the state S before the piece into A·S + B, where A is the *transition* and B the *own
  state*. A summary is A and B.

``distca/plan/recurrent`` plans these transfers in numpy, and this file copies the plan to the device. ``RecurrentCall``
(recurrent_call.py) runs the transfers.
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
    """The exchanges of summaries in one nano-batch, forward or backward.

    In backward, gradients of states travel in place of own states.

    Attributes:
        sends_state: numbers of this rank's pieces whose own state is sent, in the order in which they are sent.
        sends_transition: numbers of this rank's pieces whose transition is sent, in the order in which they are sent.
        states: moves of own states; each is one row.
        transitions: moves of transitions; each is one row.
        chains: for each document whose summaries this rank reads, the document's number and its links. Each link is a
            piece: the row where the piece's summary arrives, and the piece's number if the piece is on this rank.
    """

    sends_state: list[int]
    sends_transition: list[int]
    states: RowMoves
    transitions: RowMoves
    chains: tuple[tuple[int, tuple[Link, ...]], ...]

    @staticmethod
    def of(route: ChainRoute, ranks: int, device: Destination) -> StateRoutes:
        """Copies ``route`` to ``device``."""
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
        pieces: each piece's rows, and the places of the piece's halo rows among all halo rows that arrived.
        opens: for each piece, whether the piece is the first of its document.
        closes: for each piece, whether the piece is the last of its document.
        given: int64 numbers of this rank's rows that are sent as halo rows.
        halo_to_pieces: moves of halo rows to the ranks whose pieces read the rows.
        halo_to_home: moves of the gradients of halo rows back. Gradients of one row are added up.
        forward: exchanges of summaries.
        backward: exchanges of gradients of states, with transitions.
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
            layouts: for each nano-batch, the ranks and rows on which documents lie.
            rank: this rank, numbered as in the layouts.
            halo_rows: number of rows that the convolution reads before each row.
            device: a device, or an upload to a device. With an upload, tensors get their values when the upload is
                sent.
        """
        with uploading(device) as upload:
            arrived, routes = 0, []
            for route in piece_routes(layouts, rank, halo_rows):
                arrived += route.halo.exchange.destination_rows
                routes.append(_of(route, arrived, upload))
            return tuple(routes)

    def with_backward(self, other: RecurrentRoutes) -> RecurrentRoutes:
        """Returns these routes with the backward exchanges of ``other``.

        With pipeline stages, backward of a micro-batch runs beside other micro-batches than forward did, so the ranks
        exchange other rows."""
        return replace(self, halo_to_home=other.halo_to_home, backward=other.backward)


def _of(route: PieceRoute, arrived: int, device: Destination) -> RecurrentRoutes:
    """Returns the routes of one nano-batch.

    ``arrived`` is the number of halo rows that have arrived by the end of this nano-batch. Where a document has no
    earlier row, the convolution reads a row of zeros, which has the index ``arrived``."""
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
