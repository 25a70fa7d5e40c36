from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.data import Sampler
from distca.data.sampler import WINDOW
from distca.errors import DataError

lengths_strategy = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def identity(batches):
    return [(mb.documents.tolist(), None if mb.rank_of is None else mb.rank_of.tolist()) for b in batches for mb in b]


@given(lengths_strategy, st.integers(1, 4), st.booleans(), st.integers(0, 5), st.integers(1, 3))
def test_no_micro_batch_or_rank_is_overfull(lengths, ranks, whole, seed, micro_batches):
    sampler = Sampler(np.array(lengths), ranks, 40, micro_batches, seed, whole)
    for _ in range(5):
        batch = sampler.next()
        assert len(batch) == micro_batches
        for micro_batch in batch:
            assert len(micro_batch.documents) > 0
            assert micro_batch.lengths.tolist() == [lengths[document] for document in micro_batch.documents]
            assert micro_batch.tokens <= ranks * 40
            assert (micro_batch.rank_of is not None) == whole
            if micro_batch.rank_of is not None:
                per_rank = np.bincount(micro_batch.rank_of, weights=micro_batch.lengths, minlength=ranks)
                assert len(per_rank) == ranks
                assert per_rank.max() <= 40


@given(lengths_strategy, st.integers(1, 3), st.booleans(), st.integers(0, 5), st.integers(1, 20))
def test_every_document_is_dealt_once_per_epoch(lengths, ranks, whole, seed, steps):
    """Dealt and waiting documents together are the shuffled epochs up to the cursor: none is lost, none is extra."""
    sampler = Sampler(np.array(lengths), ranks, 40, 1, seed, whole)
    seen = Counter(int(document) for _ in range(steps) for mb in sampler.next() for document in mb.documents)
    state = sampler.state_dict()
    seen.update(state["waiting"])
    assert sum(seen.values()) == state["epoch"] * len(lengths) + state["cursor"]
    assert {seen[document] - state["epoch"] for document in range(len(lengths))} <= {0, 1}


def test_epochs_are_shuffled_differently():
    sampler = Sampler(np.full(50, 2), 1, 100, 1, 3)
    epochs = [sampler.next()[0].documents.tolist() for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(50))
    assert epochs[0] != epochs[1]
    assert sampler.epoch == 1


def test_the_seed_alone_decides_the_order():
    def order(seed):
        return identity([Sampler(np.full(50, 2), 1, 100, 1, seed).next()])

    assert order(1) == order(1) != order(2)


@given(lengths_strategy, st.booleans(), st.integers(0, 5), st.integers(0, 12))
def test_resuming_goes_on_exactly(lengths, whole, seed, steps):
    uninterrupted = Sampler(np.array(lengths), 2, 40, 2, seed, whole)
    for _ in range(steps):
        uninterrupted.next()
    resumed = Sampler(np.array(lengths), 2, 40, 2, seed, whole)
    resumed.load_state_dict(json.loads(json.dumps(uninterrupted.state_dict())))
    assert identity([uninterrupted.next() for _ in range(6)]) == identity([resumed.next() for _ in range(6)])


def test_a_saved_state_does_not_change_when_the_sampler_goes_on():
    sampler = Sampler(np.arange(1, 40), 2, 40, 1, 0)
    sampler.next()
    state = sampler.state_dict()
    before = json.dumps(state)
    sampler.next()
    assert json.dumps(state) == before


def test_the_state_stays_small_and_waiting_is_bounded():
    rng = np.random.default_rng(0)
    sampler = Sampler(rng.integers(1, 1000, 50_000), 4, 1000, 1, 0, whole=True)
    for _ in range(200):
        sampler.next()
        assert len(sampler.state_dict()["waiting"]) <= WINDOW
    assert len(json.dumps(sampler.state_dict())) < 2000


def test_resume_may_change_the_number_of_ranks():
    lengths = np.tile(np.arange(1, 41), 10)
    sampler = Sampler(lengths, 2, 40, 1, 0)
    seen = sampler.next()[0].documents.tolist()
    other = Sampler(lengths, 3, 40, 2, 0)
    other.load_state_dict(sampler.state_dict())
    rest = [document for mb in other.next() for document in mb.documents.tolist()]
    state = other.state_dict()
    assert sorted(seen + rest + state["waiting"]) == sorted(set(seen + rest + state["waiting"]))
    assert len(seen + rest + state["waiting"]) == state["cursor"]


@pytest.mark.parametrize("whole", [False, True])
def test_ranks_are_filled_well(whole):
    """Log-normal lengths up to a rank's capacity: on average less than 3 % of the room stays empty."""
    rng = np.random.default_rng(1)
    lengths = np.minimum(rng.lognormal(6, 1.5, 20_000).astype(np.int64) + 1, 8192)
    sampler = Sampler(lengths, 4, 8192, 4, 0, whole)
    filled = [mb.tokens / (4 * 8192) for _ in range(25) for mb in sampler.next()]
    assert np.mean(filled) > 0.97
    assert np.min(filled) > 0.85


def test_a_document_that_waits_goes_first_next_time():
    sampler = Sampler(np.array([10, 9, 8, 7, 6]), 1, 10, 1, 0)
    sampler.next()
    waiting = sampler.state_dict()["waiting"]
    assert sampler.next()[0].documents[0] == waiting[0]


def test_a_document_longer_than_a_micro_batch_is_refused():
    with pytest.raises(DataError) as error:
        Sampler(np.array([5, 4097]), 4, 1024, 1, 0)
    assert str(error.value) == (
        "A document of 4,097 tokens does not fit into a micro-batch of 4 ranks × 1,024 tokens, which holds 4,096 "
        "tokens; raise `tokens_per_rank`, or lower `context_length` and set `longer` to split."
    )
    assert len(Sampler(np.array([5, 4096]), 4, 1024, 1, 0).next()) == 1


def test_a_whole_document_longer_than_a_rank_is_refused():
    with pytest.raises(DataError, match=r"A document of 1,025 tokens does not fit into one rank.*`tokens_per_rank`"):
        Sampler(np.array([5, 1025]), 4, 1024, 1, 0, whole=True)
    assert Sampler(np.array([5, 1025]), 4, 1024, 1, 0).next()[0].tokens <= 4096


@pytest.mark.parametrize(
    ("lengths", "arguments", "message"),
    [
        ([], (1, 8, 1, 0), "no document to train on"),
        ([1], (0, 8, 1, 0), "ranks is at least 1, not 0"),
        ([1], (1, 0, 1, 0), "`tokens_per_rank` is at least 1, not 0"),
        ([1], (1, 8, 0, 0), "`micro_batches` is at least 1, not 0"),
    ],
)
def test_impossible_settings_are_named(lengths, arguments, message):
    with pytest.raises(DataError, match=message):
        Sampler(np.array(lengths, dtype=np.int64), *arguments)


@pytest.mark.parametrize(
    ("lengths", "seed", "message"),
    [
        ([3, 5], 0, "had documents 3"),
        ([3, 5, 8], 0, "had tokens"),
        ([3, 5, 7], 1, "seed"),
        ([5, 3, 7], 0, "are in another order than when the checkpoint was saved"),
    ],
)
def test_a_state_of_other_data_is_refused(lengths, seed, message):
    state = Sampler(np.array([3, 5, 7]), 1, 10, 1, 0).state_dict()
    with pytest.raises(DataError, match=message):
        Sampler(np.array(lengths), 1, 10, 1, seed).load_state_dict(state)
