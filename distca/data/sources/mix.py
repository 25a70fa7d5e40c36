"""Synthetic documents for benchmarks: lengths follow a named mix, tokens are pseudo-random."""

from __future__ import annotations

import numpy as np

from distca.data.mixes import sample_documents
from distca.data.sources.source import BYTE_VOCABULARY
from distca.errors import DataError, MixError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class RandomTokens:
    """Documents whose every token is a pure function of (seed, document, position), so that any rank makes its own.

    There is nothing to learn in these tokens: they are for measuring time and memory.

    Attributes:
        lengths: [D] int64.
        vocabulary: token ids are in [0, vocabulary).
    """

    def __init__(self, lengths: np.ndarray, vocabulary: int, seed: int) -> None:
        self.lengths = lengths
        self.vocabulary = vocabulary
        self._seed = seed

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """[stop - start] int64 tokens of one document."""
        assert 0 <= start <= stop <= self.lengths[document]
        key = _scrambled(_scrambled(np.array([self._seed], dtype=np.uint64)) ^ np.uint64(document))
        positions = np.arange(start, stop, dtype=np.uint64)
        return (_scrambled(positions ^ key) % np.uint64(self.vocabulary)).astype(np.int64)

    def where(self, document: int) -> str:
        """The number of one document, which no file holds."""
        return f"document {document} of the mix"


class Mix(RandomTokens):
    """Random tokens in documents whose lengths follow a mix, drawn by ``sample_documents``."""

    def __init__(
        self, mix: str, tokens: int, seed: int, *, vocabulary: int | None = None, max_length: int | None = None
    ) -> None:
        """Draw documents of ``tokens`` tokens in all from a mix, one of ``MIX_NAMES``, cut or stretched to
        ``max_length``.

        Raises:
            DataError: if there is no such mix, or no documents can be drawn.
        """
        try:
            lengths = sample_documents(mix, tokens, seed, context=max_length)
        except MixError as error:
            raise DataError(f"The document source 'mix' with `path` {mix!r} cannot be drawn: {error}") from None
        if len(lengths) == 0:
            raise DataError("The document source 'mix' was asked for 0 tokens, so it has no document.")
        super().__init__(lengths, vocabulary or BYTE_VOCABULARY, seed)


def _scrambled(values: np.ndarray) -> np.ndarray:
    """SplitMix64's output function, applied to uint64 counters (arithmetic is modulo 2**64)."""
    mixed = values * _GOLDEN + _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
