"""Document lengths of the mixes that long-context training is measured with, for plans and benchmarks without data.

The histograms in ``mixes/*.csv`` are those of the Pretrain and ProLong mixes used by WLB-LLM and by the DistCA paper
(arXiv 2510.18121, section 6).
"""

from __future__ import annotations

import csv
from functools import cache
from importlib import resources
from typing import Literal, get_args

import numpy as np

Mix = Literal["pretrain", "prolong"]

_SHORT = 65_536
"""Documents below this many tokens are thinned out by ``long_context``; longer ones are repeated."""


class MixError(ValueError):
    """A mix or a size that cannot be sampled; the message names the value and what is allowed."""


def sample_lengths(mix: Mix, tokens: int, seed: int, *, max_length: int | None = None) -> np.ndarray:
    """Draw document lengths of a mix until they hold exactly ``tokens`` tokens.

    A bin is drawn by its count of documents, a length evenly inside the bin. The last document is cut to fit, so that
    it may be shorter than any of the mix.

    Args:
        mix: "pretrain" (lengths up to 125K) or "prolong" (up to 340K).
        tokens: total tokens, at least 0.
        seed: of numpy's default generator; the same seed gives the same lengths.
        max_length: documents longer than this are cut to it.

    Returns:
        [D] int64 lengths, each at least 1, that add up to ``tokens``.

    Raises:
        MixError: on an unknown mix, negative tokens, or a max_length below 1.
    """
    if mix not in get_args(Mix):
        raise MixError(f"There is no mix {mix!r}; choose one of {', '.join(get_args(Mix))}.")
    if tokens < 0:
        raise MixError(f"Cannot draw {tokens} tokens; give 0 or more.")
    if max_length is not None and max_length < 1:
        raise MixError(f"max_length is {max_length}; documents have at least 1 token.")
    low, high, count = _histogram(mix)
    generator = np.random.default_rng(seed)
    mean = float((count * (low + high - 1) / 2).sum() / count.sum())
    drawn: list[np.ndarray] = []
    missing = tokens
    while missing > 0:
        some = generator.choice(len(count), size=int(missing / mean) + 16, p=count / count.sum())
        lengths = generator.integers(low[some], high[some])
        if max_length is not None:
            lengths = np.minimum(lengths, max_length)
        drawn.append(lengths)
        missing -= int(lengths.sum())
    return _cut_to(np.concatenate(drawn) if drawn else np.zeros(0, np.int64), tokens)


def long_context(lengths: np.ndarray, context: int, seed: int) -> np.ndarray:
    """Turn a mix into a long-context one, as the paper does for contexts of 128K and more.

    A random half of the documents under 64K tokens is dropped, each longer one appears four times, all are stretched by
    context / 64K, cut to ``context``, and shuffled.

    Args:
        lengths: [D] tokens per document.
        context: longest document, in tokens; at least 64K.
        seed: of numpy's default generator.

    Returns:
        [D'] int64 lengths between 1 and ``context``; their sum differs from that of ``lengths``.

    Raises:
        MixError: on a context below 64K.
    """
    if context < _SHORT:
        raise MixError(f"The context is {context:,} tokens; stretching starts at {_SHORT:,}.")
    generator = np.random.default_rng(seed)
    length = np.asarray(lengths, np.int64)
    short, long = length[length < _SHORT], length[length >= _SHORT]
    kept = short[np.sort(generator.permutation(len(short))[: len(short) // 2])]
    mixed = generator.permutation(np.concatenate((kept, np.tile(long, 4))))
    return np.clip(mixed * context // _SHORT, 1, context)


def _cut_to(lengths: np.ndarray, tokens: int) -> np.ndarray:
    ends = np.cumsum(lengths)
    kept = lengths[: int(np.searchsorted(ends, tokens, side="left")) + 1].copy()
    if len(kept):
        kept[-1] -= int(kept.sum()) - tokens
    return kept


@cache
def _histogram(mix: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[B] int64 low, high (exclusive) and count of every bin."""
    text = resources.files("distca.data").joinpath("mixes", f"{mix}.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
    low, high, count = (np.array([int(row[key]) for row in rows], np.int64) for key in ("low", "high", "count"))
    return low, high, count
