"""How long the documents of a corpus are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

QUANTILES = (0.1, 0.5, 0.9, 0.99)
LONG = (8192, 32768, 65536)


@dataclass(frozen=True)
class LengthStatistics:
    """Document lengths in figures.

    Attributes:
        documents: number of documents.
        tokens: tokens of all documents.
        mean: tokens per document.
        quantiles: document length at each share of QUANTILES.
        shortest: tokens of the shortest document.
        longest: tokens of the longest document.
        long_shares: for each length of LONG, the share of all tokens that is in documents longer than it.
        attention_shares: for each length of LONG, the share of all causal query-key pairs that is in those documents; a
            document of n tokens has n(n + 1)/2.
    """

    documents: int
    tokens: int
    mean: float
    quantiles: dict[float, float]
    shortest: int
    longest: int
    long_shares: dict[int, float]
    attention_shares: dict[int, float]


def length_statistics(lengths: np.ndarray) -> LengthStatistics:
    """Statistics of [D] document lengths, D at least 1."""
    tokens = int(lengths.sum())
    pairs = lengths.astype(np.float64) * (lengths + 1) / 2
    return LengthStatistics(
        documents=len(lengths),
        tokens=tokens,
        mean=tokens / len(lengths),
        quantiles={share: float(np.quantile(lengths, share)) for share in QUANTILES},
        shortest=int(lengths.min()),
        longest=int(lengths.max()),
        long_shares={limit: float(lengths[lengths > limit].sum() / tokens) for limit in LONG},
        attention_shares={limit: float(pairs[lengths > limit].sum() / pairs.sum()) for limit in LONG},
    )
