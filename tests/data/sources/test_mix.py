from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("distca.data.mixes")

from distca.data import open_source


def open_mix(seed=0, vocabulary=1000):
    return open_source("mix", "pretrain", vocabulary=vocabulary, seed=seed, mix_tokens=1 << 20, max_length=1 << 15)


def test_tokens_are_a_function_of_seed_document_and_position():
    source = open_mix()
    document = int(source.lengths.argmax())
    length = int(source.lengths[document])
    whole = source.read(document, 0, length)
    assert np.array_equal(source.read(document, 7, 90), whole[7:90])
    assert np.array_equal(open_mix().read(document, 0, length), whole)
    # Two independent streams agree on one id in 1000, not on most.
    assert (open_mix(seed=1).read(0, 0, 1) != source.read(0, 0, 1)).size == 1
    other = int(np.argsort(source.lengths)[-2])
    shared = min(length, int(source.lengths[other]))
    assert (source.read(other, 0, shared) == whole[:shared]).mean() < 0.02


def test_ids_cover_the_vocabulary_evenly():
    source = open_mix(vocabulary=10)
    tokens = np.concatenate([source.read(d, 0, int(n)) for d, n in enumerate(source.lengths)])
    counts = np.bincount(tokens, minlength=10)
    assert len(counts) == 10
    # 2**20 draws over 10 ids: the standard deviation of a count is about 0.3 % of it.
    assert abs(counts / counts.mean() - 1).max() < 0.02


def test_lengths_respect_the_limit_and_the_default_vocabulary_is_256():
    source = open_source("mix", "pretrain", mix_tokens=1 << 20, max_length=1 << 12)
    assert source.lengths.max() <= 1 << 12
    assert source.lengths.dtype == np.int64
    assert source.vocabulary == 256


def test_an_unknown_mix_is_a_sentence():
    with pytest.raises(ValueError, match="nothing-like-it"):
        open_source("mix", "nothing-like-it")
