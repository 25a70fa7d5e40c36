"""The bytes that recurrent layers move in a plan, for ``distca plan``: halos, and summaries of pieces of documents."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from distca.errors import OptionError
from distca.plan import MicroBatchPlan
from distca.plan.recurrence import Recurrence
from distca.plan.recurrent.pieces import DocumentPieces
from distca.plan.recurrent.traffic import recurrent_nanos
from distca.words import count, format_bytes

_MOST = 1 << 20


@dataclass(frozen=True)
class RecurrentFigures:
    """The recurrent layers of a micro-batch, forward and backward.

    Attributes:
        layers: of the model.
        bytes_of_one_layer: that travel between ranks.
        busiest_rank_bytes_of_one_layer: of summaries that a rank sends or receives, in its larger direction.
        most_pieces_of_a_document: which lie on several ranks, or in both nano-batches.
        most_summaries_read: by a rank in forward, its own among them.
    """

    layers: int
    bytes_of_one_layer: int
    busiest_rank_bytes_of_one_layer: int
    most_pieces_of_a_document: int
    most_summaries_read: int

    @staticmethod
    def of(made: MicroBatchPlan, what: Recurrence, layers: int) -> RecurrentFigures:
        """Count them from the plan's layouts."""
        layouts = [each.layout for each in made.nano_batches]
        nanos = recurrent_nanos(layouts, what.halo_rows)
        moved = np.zeros((2, layouts[0].ranks), np.int64)
        for each in (summaries for nano in nanos for summaries in (nano.forward, nano.backward)):
            for pairs, size in ((each.states, what.state_bytes), (each.transitions, what.transition_bytes)):
                moved += size * np.stack((pairs.sent, pairs.received))
        return RecurrentFigures(
            layers,
            sum(nano.travelling_bytes(what) for nano in nanos),
            int(moved.max()),
            int(np.bincount(DocumentPieces.of(layouts).shards.document).max()),
            int(np.sum([nano.forward.read for nano in nanos], axis=0).max()),
        )

    def rows(self) -> list[tuple[str, str]]:
        """For the table."""
        layers = count(self.layers, "recurrent layer")
        return [
            (f"summaries and halos, {layers}", format_bytes(self.bytes_of_one_layer * self.layers)),
            (
                "most summaries sent or received by one rank",
                f"{format_bytes(self.busiest_rank_bytes_of_one_layer)} in a layer",
            ),
            ("most pieces of a document", f"{self.most_pieces_of_a_document}"),
            ("most summaries read by one rank, forward", f"{self.most_summaries_read} in a layer"),
        ]

    def figures(self) -> dict[str, int]:
        """For programs."""
        return asdict(self)


def gated_delta_net(sizes: str) -> Recurrence:
    """The recurrence of --recurrent_heads.

    Raises:
        OptionError: they are not four numbers that fit together.
    """
    numbers = [int(each) if each.strip().isdecimal() else 0 for each in sizes.split(",")]
    if len(numbers) != 4 or not all(1 <= each <= _MOST for each in numbers) or numbers[1] % numbers[0]:
        raise OptionError(
            f"--recurrent_heads is {sizes!r}; it must be four numbers from 1 on, comma-separated: key heads, value "
            "heads (a multiple of them), and the sizes of a key head and of a value head."
        )
    return Recurrence.gated_delta_net(*numbers)
