"""A document source whose tokens tell where they are from, and which notes every token that is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest


class CountingSource:
    """Token at (document, position) is ``1000 * document + position``; ``reads`` counts each (document, position)."""

    vocabulary = 1_000_000

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = np.array(lengths, dtype=np.int64)
        self.reads: Counter[tuple[int, int]] = Counter()

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self.lengths[document]
        self.reads.update((document, position) for position in range(start, stop))
        return 1000 * document + np.arange(start, stop, dtype=np.int64)


@pytest.fixture(scope="session")
def counting_source() -> Callable[[Sequence[int]], CountingSource]:
    return CountingSource
