"""Document lengths of the mixes that long-context training is measured with, for plans and benchmarks without data.

The histograms in ``mixes/*.csv`` are those of the Pretrain and ProLong mixes used by WLB-LLM and by the DistCA paper
(arXiv 2510.18121, section 6).
"""

from __future__ import annotations

import csv
from functools import cache
from importlib import resources
from typing import Literal, cast, get_args

import numpy as np

from distca.errors import MixError

Mix = Literal["pretrain", "prolong"]
_LONG = "-long"
"""Ends the name of a mix's long-context version."""
MIX_NAMES: tuple[str, ...] = (*get_args(Mix), *(mix + _LONG for mix in get_args(Mix)))
"""Everything that ``sample_mix`` draws from; the only list of names."""
LONG_CONTEXT = 131_072
"""Longest document of a long-context version where nobody says another."""

_NOT_OF_THE_ORDER = 1 << 96
"""Added to a seed. numpy takes seeds in words of 32 bits, and a seed of 64 bits and an epoch never have this one."""
_SHORT = 65_536
"""Documents below this many tokens are thinned out by ``long_context``; longer ones are repeated."""


def sample_mix(name: str, tokens: int, seed: int, *, context: int | None = None) -> np.ndarray:
    """Draw exactly ``tokens`` tokens of a mix or of its long-context version, by name.

    Args:
        name: one of ``MIX_NAMES``.
        tokens: total tokens, at least 0.
        seed: of numpy's default generator.
        context: longest document, in tokens: longer ones are cut to it, and a long-context version is stretched to it.
            Without it documents are as long as the mix's, and those of a long-context version up to ``LONG_CONTEXT``.

    Returns:
        [D] int64 lengths, each at least 1, that add up to ``tokens``.

    Raises:
        MixError: on an unknown name, negative tokens, or a context below 1.
    """
    if name not in MIX_NAMES:
        raise MixError(f"There is no mix {name!r}; choose one of {', '.join(MIX_NAMES)}.")
    mix = cast(Mix, name.removesuffix(_LONG))
    if name.endswith(_LONG):
        return sample_long_context(mix, tokens, LONG_CONTEXT if context is None else context, seed)
    return sample_lengths(mix, tokens, seed, max_length=context)


def sample_documents(name: str, tokens: int, seed: int, *, context: int | None = None) -> np.ndarray:
    """Draw a mix whose documents are dealt in an order that depends on the same seed.

    As :func:`sample_mix`, but the lengths of a plain mix come from other random numbers than those by which
    ``distca.data.sampler.shuffled`` orders documents. With the same numbers the first epoch would begin with the
    shortest documents. A long-context version is shuffled when it is drawn.
    """
    return sample_mix(name, tokens, seed + (0 if name.endswith(_LONG) else _NOT_OF_THE_ORDER), context=context)


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


def long_context(lengths: np.ndarray, context: int, seed: int, *, full_share: float = 0.0) -> np.ndarray:
    """Turn a mix into a long-context one, as the paper does for contexts of 128K and more.

    A random half of the documents under 64K tokens is dropped, and each longer one appears four times. All are
    stretched by context / 64K, cut to ``context``, and shuffled.

    Args:
        lengths: [D] tokens per document.
        context: longest document, in tokens; at least 64K.
        seed: of numpy's default generator.
        full_share: of the documents that have 64K tokens or more after stretching, this random share (0 to 1) is set
            to ``context``.

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
    stretched = np.clip(mixed * context // _SHORT, 1, context)
    if full_share:
        long = np.flatnonzero(stretched >= _SHORT)
        stretched[generator.permutation(long)[: round(full_share * len(long))]] = context
    return stretched


def sample_long_context(mix: Mix, tokens: int, context: int, seed: int, *, full_share: float = 0.0) -> np.ndarray:
    """Draw exactly ``tokens`` tokens of the long-context version of a mix, as long-context training is measured with.

    :func:`long_context` of enough documents of the mix. A context below 64K gets the lengths of one of 128K, scaled
    down: a small machine can then run the same shape of work.

    Args:
        mix: "pretrain" or "prolong".
        tokens: total tokens, at least 0.
        context: longest document, in tokens.
        seed: of numpy's default generator.
        full_share: as for :func:`long_context`.

    Returns:
        [D] int64 lengths between 1 and ``context`` that add up to ``tokens``.

    Raises:
        MixError: as :func:`sample_lengths`.
    """
    if context < 1:
        raise MixError(f"The context is {context}; documents have at least 1 token.")
    sample_lengths(mix, min(tokens, 0), seed)  # which refuses what cannot be drawn
    drawn_at = context if context >= _SHORT else 2 * _SHORT
    drawn, enough = np.zeros(0, np.int64), max(tokens * drawn_at // context, _SHORT)
    while drawn.sum() < tokens:
        sampled = sample_lengths(mix, enough if tokens > 0 else 0, seed)
        drawn = long_context(sampled, drawn_at, seed, full_share=full_share)
        if drawn_at != context:
            drawn = np.maximum(drawn * context // drawn_at, 1)
        enough *= 2
    return _cut_to(drawn, tokens)


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
