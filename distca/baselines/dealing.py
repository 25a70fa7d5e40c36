"""The rank, or the group of ranks, that gets each document.

Array legend: D documents, R data-parallel ranks, M micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.baselines.mode import Mode
from distca.data.sampler import MicroBatch
from distca.errors import BaselineError
from distca.plan.geometry import pairs
from distca.words import count


@dataclass(frozen=True)
class Work:
    """Seconds of a document on one rank, forward and backward over all layers.

    Attributes:
        per_token: of everything but core attention.
        per_pair: of core attention in layers without a window, for each pair of query and key.
        windowed: the same of layers with windows: (window, seconds per pair).
    """

    per_token: float
    per_pair: float
    windowed: tuple[tuple[int, float], ...] = ()

    def seconds(self, lengths: np.ndarray) -> np.ndarray:
        """[D] seconds."""
        length = np.asarray(lengths, np.float64)
        found = self.per_token * length + self.per_pair * length * (length + 1) / 2
        for window, per_pair in self.windowed:
            found += per_pair * pairs(length, length, window)
        return found


def deal(lengths: np.ndarray, bins: int, work: Work, capacity: int | None = None) -> np.ndarray | None:
    """Deal whole documents to bins of equal work: the longest first, to the bin with the least work that has room.

    Args:
        lengths: [D] tokens.
        bins: ranks or groups of ranks.
        work: what is made equal.
        capacity: most tokens of a bin; None for any number.

    Returns:
        [D] bin of each document; None where a document found no room.
    """
    seconds = work.seconds(lengths)
    load, tokens = np.zeros(bins), np.zeros(bins, np.int64)
    bin_of = np.empty(len(lengths), np.int64)
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        fits = np.flatnonzero(tokens + length <= capacity) if capacity is not None else np.arange(bins)
        if not len(fits):
            return None
        chosen = fits[load[fits].argmin()]
        bin_of[document] = chosen
        load[chosen] += seconds[document]
        tokens[chosen] += length
    return bin_of


VARIABLE_ROOM = 2
"""Variable-length packing may put this many times its share of tokens on a rank."""
_LONGER = 1.02
"""Most tokens of a rank where documents are dealt anew and do not fit otherwise, over what it holds."""


def groups_of(
    mode: Mode, lengths: np.ndarray, bin_of: np.ndarray, bins: int, ranks: int, room: int, work: Work
) -> np.ndarray:
    """[D] context-parallel group of each document; for methods without groups, its rank.

    "packed" and "megatron-te" keep the ranks that the sampler chose, as plain packing does, "packed-dealt" those of
    :func:`dealt_anew`.
    Other groups get equal work if documents can be dealt so, else the bins that the sampler packed on their ranks.

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
    check_holds(mode, bins, ranks, room)
    as_sampled = bin_of // (bins // groups)
    if mode.degree == 1:
        return as_sampled
    dealt = deal(lengths, groups, work, mode.degree * room)
    if dealt is None and bins % groups:
        raise BaselineError(
            f"{mode.name} deals documents to groups that hold {mode.degree} × {room:,} tokens, and these do not fit; "
            f"choose a degree that is a multiple of {ranks // bins}, or raise the tokens per rank."
        )
    return as_sampled if dealt is None else dealt


def check_holds(mode: Mode, bins: int, ranks: int, room: int) -> None:
    """Refuse a mode whose groups cannot hold the longest document; of "variable" that depends on all documents.

    Args:
        mode: how to train.
        bins: equal shares of the ranks, each the fewest that hold the longest document.
        ranks: data-parallel ranks.
        room: tokens of a rank.

    Raises:
        BaselineError: in a sentence.
    """
    if mode.disaggregated or mode.method == "variable" or ranks // mode.degree <= bins:
        return
    needs = f"this context needs {count(ranks // bins, 'rank')}"
    if mode.degree == 1:
        raise BaselineError(
            f"{mode.name} keeps a document on one rank of {room:,} tokens, but {needs}; shorten the context, "
            f"take context parallelism over {ranks // bins} ranks or more, or raise the tokens per rank."
        )
    raise BaselineError(
        f"{mode.name} keeps a document on {mode.degree} × {room:,} tokens, but {needs}; choose a degree of "
        f"{ranks // bins} or more, or raise the tokens per rank."
    )


def dealt_anew(micro_batches: Sequence[MicroBatch], ranks: int, room: int, work: Work) -> tuple[MicroBatch, ...]:
    """The documents of a step, whole, dealt over its M micro-batches and R ranks so that ranks have equal work.

    Ranks of plain data parallelism wait for each other once a step, so it is the step's work that is made equal. The
    longest document goes first to the rank with the least work that has room, there to the fullest micro-batch that
    takes it. Where documents do not fit so, they stay where they are.

    Args:
        micro_batches: as sampled.
        ranks: data-parallel ranks.
        room: tokens of a rank in a micro-batch.
        work: what a document costs.
    """
    lengths = np.concatenate([each.lengths for each in micro_batches])
    seconds = work.seconds(lengths)
    for most in (room, int(_LONGER * room)):
        free = np.full((ranks, len(micro_batches)), most)
        load, place = np.zeros(ranks), np.empty((len(lengths), 2), np.int64)
        for document in np.argsort(-lengths, kind="stable").tolist():
            fits = free >= lengths[document]
            if not fits.any():
                break
            rank = int(np.where(fits.any(axis=1), load, np.inf).argmin())
            number = int(np.where(fits[rank], free[rank], most + 1).argmin())
            free[rank, number] -= lengths[document]
            load[rank] += seconds[document]
            place[document] = rank, number
        else:
            documents = np.concatenate([each.documents for each in micro_batches])
            chosen = [np.flatnonzero(place[:, 1] == number) for number in range(len(micro_batches))]
            return tuple(MicroBatch(documents[each], lengths[each], place[each, 0]) for each in chosen)
    return tuple(micro_batches)


def ranks_of_document(context: int, ranks: int, tokens_per_rank: int) -> int | None:
    """The fewest ranks that divide ``ranks`` and hold a document of ``context`` tokens; None where all do not."""
    fitting = (size for size in range(1, ranks + 1) if ranks % size == 0 and size * tokens_per_rank >= context)
    return next(fitting, None)
