"""Memory of states and summaries of recurrent layers on a busy rank, predicted before any layout is known.

Constants are what layouts of 128K tokens per rank have at most, of both mixes of long documents
(tests/train/run/test_state_memory.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from distca.plan.recurrence import Recurrence

_CONTINUING, _BETWEEN = 14, 10
"""Pieces of a rank, in both nano-batches, that begin with a state; and those of them that others follow."""
_READ_BY_RANKS, _READ, _READ_OF_LONG = 3.3, 36, 31
"""Summaries that a rank reads in both nano-batches. In a small pool it is the first number for each rank. In a large
pool it is the second number, and the third for each further rank that the longest document spans."""


@dataclass(frozen=True)
class StateMemory:
    """Bytes of one recurrent layer on a busy rank.

    Attributes:
        kept: of a micro-batch until its backward.
        at_work: of summaries that arrive.
    """

    kept: int
    at_work: int


def busy_pieces(ranks: int, spanned: float) -> tuple[int, int, float]:
    """Pieces that begin with a state, those of them with others behind them, and summaries that are read.

    Args:
        ranks: data-parallel ranks.
        spanned: ranks that the longest document spans at least.
    """
    read = min(_READ_BY_RANKS * ranks, _READ + _READ_OF_LONG * (max(spanned, 1.0) - 1))
    return min(ranks + 1, _CONTINUING), min(ranks - 1, _BETWEEN), read


def state_memory(what: Recurrence, ranks: int, spanned: float) -> StateMemory:
    """The memory of a layer; arguments as in :func:`busy_pieces`."""
    continuing, between, read = busy_pieces(ranks, spanned)
    kept = continuing * what.state_bytes + between * what.transition_bytes
    return StateMemory(kept, int(read * (what.state_bytes + what.transition_bytes)))
