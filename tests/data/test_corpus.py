from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.data import Corpus
from distca.data.blend import Blend, Ingredient
from distca.errors import DataError

lengths_strategy = st.lists(st.integers(1, 60), min_size=2, max_size=20)


def everything(documents):
    return [documents.read(index, 0, int(length)).tolist() for index, length in enumerate(documents.lengths)]


def test_a_document_that_is_too_long_is_refused_with_the_settings_to_change(counting_source):
    with pytest.raises(DataError) as error:
        Corpus(counting_source([5, 70, 66]), 64)
    assert str(error.value) == (
        "Document 1 has 70 tokens, more than `context_length` 64 (2 of 3 documents are longer); raise "
        "`context_length`, or set `longer` to split to cut such documents, or to skip to leave them out."
    )


def test_split_cuts_long_documents_into_consecutive_ones(counting_source, caplog):
    with caplog.at_level(logging.INFO, logger="distca"):
        corpus = Corpus(counting_source([3, 10, 8]), 4, "split")
    assert corpus.train.lengths.tolist() == [3, 4, 4, 2, 4, 4]
    assert everything(corpus.train)[1:4] == [[1000, 1001, 1002, 1003], [1004, 1005, 1006, 1007], [1008, 1009]]
    assert "2 of 3, are split" in caplog.text


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


class Talks:
    """Conversations whose tokens are ``1000 * document + position``, with what is learned of them."""

    vocabulary = 1_000_000
    masked = True

    def __init__(self, *masks):
        self._masks = [np.array([letter == "x" for letter in mask]) for mask in masks]
        self.lengths = np.array([len(mask) for mask in masks], np.int64)

    def read(self, document, start, stop):
        return 1000 * document + np.arange(start, stop, dtype=np.int64)

    def learned(self, document, start, stop):
        return self._masks[document][start:stop]

    def where(self, document):
        return f"talk {document}"


def test_conversations_that_are_too_long_are_left_out_unless_asked_for(counting_source, caplog):
    """Cut, an answer would be learned without its question."""
    talks = Talks("..xx", "....xx", "..xx", ".....xxx..xx")
    with caplog.at_level(logging.INFO, logger="distca"):
        corpus = Corpus(talks, 4, None)
    assert everything(corpus.train) == [[0, 1, 2, 3], [2000, 2001, 2002, 2003]]
    assert [str(each) for each in corpus.left_out] == ["2 documents of more than 4 tokens"]
    assert "left out 2 documents of more than 4 tokens" in caplog.text
    assert len(Corpus(counting_source([4, 6]), 4, None).train) == 3, "texts are cut"
    assert len(Corpus(counting_source([4, 6]), 4, "skip").train) == 1
    assert len(Corpus(talks, 4, None, 0.5).validation) == 1, "of those that are there"
    with pytest.raises(DataError, match="All of 2 documents have more than `context_length` 4 tokens"):
        Corpus(Talks("..xxx", "..xxx"), 4, None)


def test_pieces_with_nothing_to_learn_are_left_out(caplog):
    """A piece's first token has nothing before it, so it is none to learn either."""
    talks = Talks("....x...xx..", "..xx", "....")
    with caplog.at_level(logging.INFO, logger="distca"):
        corpus = Corpus(talks, 4, "split")
    assert everything(corpus.train) == [[8, 9, 10, 11], [1000, 1001, 1002, 1003], [2000, 2001, 2002, 2003]]
    assert "left out 2 pieces of longer documents with nothing to learn" in caplog.text
    assert "also conversations, whose answers may be apart from their questions" in caplog.text


def test_a_blend_leaves_out_the_conversations_of_its_sources_only(counting_source):
    parts = [Ingredient("jsonl", "a", None, "epochs", 1.0), Ingredient("jsonl", "b", None, "epochs", 1.0)]
    corpus = Corpus(Blend([counting_source([6, 3]), Talks("..xxxx", "..x")], parts), 4, None)
    assert sorted(corpus.train.lengths.tolist()) == [2, 3, 3, 4]
    assert [str(each) for each in corpus.left_out] == ["1 document of more than 4 tokens"]


def test_a_piece_with_nothing_to_learn_counts_once_however_often_a_blend_uses_it():
    corpus = Corpus(Blend([Talks(".xxx....")], [Ingredient("jsonl", "a", None, "epochs", 3.0)]), 4, "split")
    assert corpus.train.lengths.tolist() == [4, 4, 4]
    assert [str(each) for each in corpus.left_out] == ["1 piece of longer documents with nothing to learn"]
