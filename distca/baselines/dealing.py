"""Which rank, or group of ranks, gets which document. Array legend: D documents, R data-parallel ranks."""

from __future__ import annotations

import numpy as np

from distca.baselines.errors import BaselineError
from distca.baselines.mode import Mode
from distca.baselines.work import Work, deal

VARIABLE_ROOM = 2
"""Variable-length packing may put this many times its share of tokens on a rank."""


def groups_of(
    mode: Mode, lengths: np.ndarray, bin_of: np.ndarray, bins: int, ranks: int, room: int, work: Work
) -> np.ndarray:
    """[D] context-parallel group of each document; for methods without groups, its rank.

    "packed" keeps the ranks that the sampler chose, as plain packing does. Groups get equal work where their tokens
    allow it, else what the sampler put on their ranks.

    Args:
        mode: a baseline.
        lengths: [D] tokens.
        bin_of: [D] bin in which the sampler packed each document.
        bins: bins that the sampler packed; each is one rank or several.
        ranks: data-parallel ranks, a multiple of ``bins``.
        room: tokens of a rank.
        work: what a document costs.

    Raises:
        BaselineError: a document does not fit into a rank or a group of this mode.
    """
    longest, groups = int(lengths.max(initial=0)), ranks // mode.degree
    if mode.method == "variable":
        dealt = deal(lengths, ranks, work, VARIABLE_ROOM * room)
        if dealt is None:
            raise BaselineError(
                f"variable keeps documents whole and gives a rank up to {VARIABLE_ROOM} × {room:,} tokens; a document "
                f"of {longest:,} tokens, or the sum of all, does not fit. Raise the tokens per rank."
            )
        return dealt
    if groups > bins:
        raise BaselineError(
            f"{mode.name} keeps a document on {mode.degree} × {room:,} tokens, but this context needs {ranks // bins} "
            f"ranks; choose a degree of {ranks // bins} or more, or raise the tokens per rank."
        )
    as_sampled = bin_of // (bins // groups)
    if mode.method == "packed":
        return as_sampled
    dealt = deal(lengths, groups, work, mode.degree * room)
    return as_sampled if dealt is None else dealt


def ranks_of_document(context: int, ranks: int, tokens_per_rank: int) -> int | None:
    """The fewest ranks that divide ``ranks`` and hold a document of ``context`` tokens; None where all do not."""
    fitting = (size for size in range(1, ranks + 1) if ranks % size == 0 and size * tokens_per_rank >= context)
    return next(fitting, None)
