from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.data import Corpus
from distca.errors import DataError

lengths_strategy = st.lists(st.integers(1, 60), min_size=2, max_size=20)


def everything(documents):
    return [documents.read(index, 0, int(length)).tolist() for index, length in enumerate(documents.lengths)]


def test_a_document_that_is_too_long_is_refused_with_the_settings_to_change(counting_source):
    with pytest.raises(DataError) as error:
        Corpus(counting_source([5, 70, 66]), 64)
    assert str(error.value) == (
        "Document 1 has 70 tokens, more than `context_length` 64 (2 of 3 documents are longer); raise "
        "`context_length`, or set `longer` to split to cut such documents."
    )


def test_split_cuts_long_documents_into_consecutive_ones(counting_source, caplog):
    with caplog.at_level(logging.INFO, logger="distca"):
        corpus = Corpus(counting_source([3, 10, 8]), 4, "split")
    assert corpus.train.lengths.tolist() == [3, 4, 4, 2, 4, 4]
    assert everything(corpus.train)[1:4] == [[1000, 1001, 1002, 1003], [1004, 1005, 1006, 1007], [1008, 1009]]
    assert "split 2 of 3 documents" in caplog.text


@given(lengths_strategy, st.integers(1, 30), st.floats(0, 0.5), st.integers(0, 10))
def test_every_token_is_in_exactly_one_set(counting_source, lengths, context, fraction, seed):
    source = counting_source(lengths)
    corpus = Corpus(source, context, "split", fraction, seed)
    train, validation = everything(corpus.train), everything(corpus.validation)
    tokens = [token for document in train + validation for token in document]
    assert sorted(tokens) == [1000 * document + at for document, length in enumerate(lengths) for at in range(length)]
    assert max(map(len, train + validation)) <= context
    owners = [{token // 1000 for document in part for token in document} for part in (train, validation)]
    assert not owners[0] & owners[1]
    assert bool(validation) == (fraction > 0)
    assert train


def test_the_split_depends_on_the_seed_alone(counting_source):
    def chosen(seed):
        return everything(Corpus(counting_source([4] * 40), 4, validation_fraction=0.25, seed=seed).validation)

    assert chosen(1) == chosen(1)
    assert chosen(1) != chosen(2)
    assert len(chosen(1)) == 10


def test_making_a_corpus_reads_no_token(counting_source):
    source = counting_source([30] * 10)
    Corpus(source, 7, "split", 0.3)
    assert not source.reads


def test_reading_touches_only_what_is_asked_for(counting_source):
    source = counting_source([3, 20])
    corpus = Corpus(source, 8, "split")
    assert corpus.train.read(2, 1, 4).tolist() == [1009, 1010, 1011]
    assert dict(source.reads) == {(1, 9): 1, (1, 10): 1, (1, 11): 1}


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        ({"context_length": 0}, "`context_length`"),
        ({"context_length": 9, "longer": "drop"}, "`longer`"),
        ({"context_length": 9, "validation_fraction": 1.0}, "`validation_fraction`"),
        ({"context_length": 9, "validation_fraction": -0.1}, "`validation_fraction`"),
        ({"context_length": 9, "validation_fraction": 0.9}, "leaves none for training"),
        ({"context_length": 9, "seed": -1, "validation_fraction": 0.1}, "`seed`"),
    ],
)
def test_settings_out_of_range_are_named(counting_source, arguments, setting):
    with pytest.raises(DataError, match=setting):
        Corpus(counting_source([4, 5]), **arguments)


def test_lengths_are_int64(counting_source):
    corpus = Corpus(counting_source([4, 5]), 3, "split", 0.5)
    assert corpus.train.lengths.dtype == corpus.validation.lengths.dtype == np.int64
