"""Swaps whole documents between ranks, until ranks have about equal tokens and about equal attention work.

``whole.py`` gives each rank a fixed number of tokens, so it cuts a few documents where a rank is full. Swaps make
ranks' tokens only about equal, and cut no document. So they are used only if a rank may have any number of tokens (the
option ``align`` is 1). If ranks' attention work is about equal too, no row has to travel to another rank. A rank's
documents are given to the nano-batches *ping* and *pong* in the same way; below, *bins* are ranks or nano-batches.

A *swap* takes up to two documents from each of two bins, and gives them to the other bin. One of the two is the bin
that fits worst. Its partner is a bin that fits badly in the opposite way. A few partners are tried in turn, until one
has a swap that helps; then its best swap is made. Swaps end when no bin fits badly, no swap helps, or many pairs of
bins were tried.

Array legend: D documents, B bins, S sets of up to two documents. In [2, ...] arrays, tokens come first, then work; both
are fractions of a bin's mean.
"""

from __future__ import annotations

import numpy as np

OF_RANKS = 1 / 2048
"""How far the tokens of a rank may be from the mean, as a fraction of the mean. Linear layers of the fullest rank take
this much longer."""
OF_NANO_BATCHES = 1 / 128
"""The same for a rank's tokens in ping and in pong."""
_WORK = 0.002
"""Swaps end when no bin's work is further from the mean than this fraction of it, and tokens fit."""
_DOCUMENTS = 16
"""The most documents of a bin that are tried in swaps. They are of all lengths, from the longest to the shortest."""
_PARTNERS = 3
"""The most bins with which the bin that fits worst is tried."""
_TRIES = 32
"""Swaps end after about this many pairs of bins, which limits planning time. A try takes about 0.3 ms."""
_STRICT = 1e6
"""Factor on tokens that do not fit, which makes them count more than any work."""


def swapped(length: np.ndarray, work: np.ndarray, bin_of: np.ndarray, bins: int, spread: float) -> np.ndarray | None:
    """Returns [D] the bin of each document after swaps; None if a bin's tokens are then too far from the mean.

    Args:
        length: [D] tokens.
        work: [D] attention work of each document, in any unit.
        bin_of: [D] the bin of each document before.
        bins: number of bins, B.
        spread: how far a bin's tokens may be from the mean, as a fraction of the mean.

    Example: bin 0 has documents of 6 and 3 tokens, and bin 1 of 4 and 1. If 3 and 1 are swapped, both bins have 7.
    """
    # "parts" is [2, D + 1]. The last column is zero, and stands for "no document" in sets.
    parts = np.zeros((2, len(length) + 1))
    parts[:, :-1] = [each * (bins / max(float(each.sum()), 1e-300)) for each in (length, work)]
    bin_of, tries, unit = bin_of.copy(), 0, np.array([[spread**2], [_WORK**2]])
    while True:
        over = np.stack([np.bincount(bin_of, each[:-1], bins) for each in parts]) - 1.0
        misfit = _misfit(over, spread)
        worst = int(misfit.argmax())
        if tries >= _TRIES or misfit[worst] <= _WORK**2:
            break
        # Partners deviate from the mean in the most opposite way, in units of the deviations that are allowed.
        alike = (over * over[:, worst, None] / unit).sum(axis=0)
        others = [each for each in np.argsort(alike, kind="stable").tolist() if each != worst][:_PARTNERS]
        tries += len(others)
        if not any(_swap(length, parts, over, bin_of, (worst, other), spread) for other in others):
            break
    return bin_of if np.abs(over[0]).max(initial=0.0) <= spread else None


def _misfit(over: np.ndarray, spread: float) -> np.ndarray:
    """Returns how badly bins fit, [...], from how far they are above the mean, [2, ...]."""
    tokens, work = over
    return np.asarray(_STRICT * np.maximum(np.abs(tokens) - spread, 0.0) + work**2)


def _swap(
    length: np.ndarray, parts: np.ndarray, over: np.ndarray, bin_of: np.ndarray, pair: tuple[int, int], spread: float
) -> bool:
    """Makes the best swap between a pair of bins in ``bin_of``; returns False if no swap helps."""
    one, other = pair
    ours, theirs = (_sets(np.flatnonzero(bin_of == each), length) for each in pair)
    leaves = parts[:, ours].sum(axis=2)[:, :, None] - parts[:, theirs].sum(axis=2)[:, None, :]
    after = _misfit(over[:, one, None, None] - leaves, spread) + _misfit(over[:, other, None, None] + leaves, spread)
    best = int(after.argmin())
    if after.flat[best] >= _misfit(over[:, list(pair)], spread).sum() * (1 - 1e-9):
        return False
    leave, come = ours[best // len(theirs)], theirs[best % len(theirs)]
    bin_of[leave[leave < len(length)]] = other
    bin_of[come[come < len(length)]] = one
    return True


def _sets(documents: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Returns [S, 2] sets of up to two of the ``documents``; D stands for no document."""
    documents = documents[np.argsort(-length[documents], kind="stable")]
    if len(documents) > _DOCUMENTS:
        documents = documents[np.arange(_DOCUMENTS) * (len(documents) - 1) // (_DOCUMENTS - 1)]
    none = len(length)
    first, second = np.triu_indices(len(documents), 1)
    pairs = np.stack((documents[first], documents[second]), axis=1)
    singles = np.stack((documents, np.full(len(documents), none)), axis=1)
    return np.concatenate((np.array([[none, none]]), singles, pairs)).astype(np.int64)
