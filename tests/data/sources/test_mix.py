from __future__ import annotations

import numpy as np
import pytest

from distca.data import open_source
from distca.data.mixes import MIX_NAMES
from distca.data.sampler import Sampler, shuffled
from distca.data.sources.mix import Mix
from distca.errors import DataError


def open_mix(seed=0, vocabulary=1000):
    return open_source("mix", "pretrain", vocabulary=vocabulary, seed=seed, mix_tokens=1 << 20, max_length=1 << 15)


def test_tokens_are_a_function_of_seed_document_and_position():
    source = open_mix()
    document = int(source.lengths.argmax())
    length = int(source.lengths[document])
    whole = source.read(document, 0, length)
    assert np.array_equal(source.read(document, 7, 90), whole[7:90])
    assert np.array_equal(open_mix().read(document, 0, length), whole)
    # Independent streams agree on one id in 1000, not on most.
    other_seed = open_mix(seed=1)
    shared = min(int(other_seed.lengths.max()), length)
    assert shared > 100
    assert (other_seed.read(int(other_seed.lengths.argmax()), 0, shared) == whole[:shared]).mean() < 0.02
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
    with pytest.raises(DataError, match=r"`path` 'nothing-like-it' cannot be drawn: There is no mix"):
        open_source("mix", "nothing-like-it")


def test_a_mix_of_no_tokens_is_a_sentence():
    with pytest.raises(DataError, match="asked for 0 tokens"):
        open_source("mix", "pretrain", mix_tokens=0)


@pytest.mark.parametrize("mix", MIX_NAMES)
@pytest.mark.parametrize("seed", [0, 1, 2**40 + 3])
def test_a_sampler_with_the_same_seed_does_not_begin_with_the_short_documents(mix: str, seed: int) -> None:
    lengths = Mix(mix, 20_000_000, seed).lengths
    for epoch in range(2):
        order = shuffled(len(lengths), seed, epoch)
        first = lengths[order[: len(order) // 2]]
        assert np.median(first) == pytest.approx(np.median(lengths), rel=0.1)


@pytest.mark.parametrize("mix", ["pretrain", "prolong"])
def test_whole_documents_of_a_mix_leave_little_room(mix: str) -> None:
    ranks, room = 8, 340_000
    (batch,) = Sampler(Mix(mix, 20_000_000, 1).lengths, ranks, room, 1, 1, whole=True).next()
    assert np.bincount(batch.rank_of, batch.lengths, ranks).min() > 0.995 * room
