from __future__ import annotations

import numpy as np
import pytest

from distca.data.statistics import length_statistics


def test_figures_of_a_corpus_worked_out_by_hand():
    statistics = length_statistics(np.array([10, 20, 8192, 8193, 65537]))
    assert (statistics.documents, statistics.tokens, statistics.shortest, statistics.longest) == (5, 81952, 10, 65537)
    assert statistics.mean == pytest.approx(16390.4)
    assert statistics.quantiles[0.5] == 8192
    # A document of exactly 8192 tokens is not longer than 8K.
    assert statistics.long_shares == pytest.approx({8192: 73730 / 81952, 32768: 65537 / 81952, 65536: 65537 / 81952})
    pairs = [n * (n + 1) // 2 for n in (10, 20, 8192, 8193, 65537)]
    assert statistics.attention_shares[65536] == pytest.approx(pairs[-1] / sum(pairs))
