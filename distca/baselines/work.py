"""How long documents take, for dealing them to ranks. Array legend: D documents, B bins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.plan.geometry import pairs


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
