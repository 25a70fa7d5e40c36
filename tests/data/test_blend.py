from __future__ import annotations

import numpy as np
import pytest

from distca.data import Corpus
from distca.data.blend import Blend, Ingredient, read_blend
from distca.errors import DataError
from distca.train.config.cli import parse_run_config
from tests.data.conftest import CountingSource


def blend(*parts, **long):
    """Parts are (lengths, amount, value)."""
    ingredients = [Ingredient("jsonl", str(number), None, *part[1:], **long) for number, part in enumerate(parts)]
    return Blend([CountingSource(part[0]) for part in parts], ingredients)


def tokens_by_source(source, corpus):
    borders = np.cumsum([0, *(len(each.lengths) for each in source._sources)])
    owner = np.searchsorted(borders, corpus.train._document, side="right") - 1
    return [int(corpus.train.lengths[owner == number].sum()) for number in range(len(borders) - 1)]


LENGTHS = [10 + number % 7 for number in range(200)]


def test_weights_are_shares_of_tokens_and_nothing_is_left_out():
    source = blend((LENGTHS, "weight", 3), (LENGTHS[:50], "weight", 1), ([12] * 10, "weight", 1))
    corpus = Corpus(source, 100)
    first, second, third = tokens_by_source(source, corpus)
    assert first / second == pytest.approx(3, rel=0.02) and second / third == pytest.approx(1, rel=0.02)
    assert set(corpus.train._document) == set(range(260))


class LastIsLearned(CountingSource):
    """Of every document the last token alone is learned."""

    masked = True

    def learned(self, document, start, stop):
        return np.arange(start, stop) == self.lengths[document] - 1


def test_weights_are_shares_of_the_pieces_that_are_trained_on():
    ingredients = [Ingredient("jsonl", name, None, "weight", 1) for name in ("talks", "texts")]
    source = Blend([LastIsLearned([250] * 40), CountingSource([50] * 10)], ingredients)
    corpus = Corpus(source, 100, "split")
    assert tokens_by_source(source, corpus) == [40 * 50, 40 * 50]
    source = Blend([LastIsLearned([250] * 40)], [Ingredient("jsonl", "talks", None, "epochs", 0.01)])
    source._sources[0].learned = lambda document, start, stop: np.full(stop - start, not document)
    with pytest.raises(DataError, match="takes less than half of the first one"):  # and not 39 documents of no token
        Corpus(source, 100, "split")


@pytest.mark.parametrize(
    ("amount", "value", "tokens"), [("epochs", 2.5, 2.5 * sum(LENGTHS)), ("tokens", 700, 700), ("epochs", 0.1, 258.7)]
)
def test_epochs_and_tokens(amount, value, tokens):
    source = blend((LENGTHS, amount, value), ([10], "epochs", 1))
    first, second = tokens_by_source(source, Corpus(source, 100))
    assert first == pytest.approx(tokens, abs=16) and second == 10
    counts = np.bincount(Corpus(source, 100).train._document, minlength=201)[:200]
    assert counts.max() - counts.min() <= 1


def test_long_documents_get_their_share():
    source = blend((LENGTHS, "epochs", 1), long_tokens=16, long_share=0.6)
    corpus = Corpus(source, 100)
    lengths = corpus.train.lengths
    assert lengths.sum() == pytest.approx(sum(LENGTHS), rel=0.02)
    assert lengths[lengths >= 16].sum() / lengths.sum() == pytest.approx(0.6, rel=0.02)


def test_validation_documents_are_never_trained_on_and_never_repeated():
    source = blend((LENGTHS, "weight", 1), (LENGTHS[:20], "weight", 1))
    corpus = Corpus(source, 8, "split", validation_fraction=0.1, seed=3)
    assert not set(corpus.train._document) & set(corpus.validation._document)
    pieces = list(zip(corpus.validation._document, corpus.validation._offset, strict=True))
    assert len(pieces) == len(set(pieces)) > 22


def test_the_same_seed_chooses_the_same_documents():
    source = blend((LENGTHS, "epochs", 0.5))
    chosen = [source.epoch(np.arange(200), seed).tolist() for seed in (1, 1, 2)]
    assert chosen[0] == chosen[1] != chosen[2]


def test_documents_are_read_from_their_source():
    source = blend(([5, 6], "weight", 1), ([7], "weight", 1))
    assert source.lengths.tolist() == [5, 6, 7]
    assert source.read(1, 2, 4).tolist() == [1002, 1003] and source.read(2, 0, 2).tolist() == [0, 1]
    assert not source.masked and source.learned(2, 0, 3).all()


def test_a_file_is_read(tmp_path):
    (tmp_path / "blend.yaml").write_text(
        "- {source: jsonl, path: a.jsonl, weight: 3}\n"
        "- {source: parquet, path: /web, field: body, weight: 7, long: {tokens: 65536, share: 0.6}}\n"
    )
    assert read_blend(str(tmp_path / "blend.yaml")) == [
        Ingredient("jsonl", str(tmp_path / "a.jsonl"), None, "weight", 3),
        Ingredient("parquet", "/web", "body", "weight", 7, 65536, 0.6),
    ]


@pytest.mark.parametrize("written", ["1e12", "1E+12", "1.e12", "1.0e+12", "+1_0e11", "1000000000000"])
def test_numbers_are_read_as_in_configuration_files(tmp_path, written):
    (tmp_path / "blend.yaml").write_text(f"- {{source: stdlib, weight: {written}}}\n")
    (ingredient,) = read_blend(str(tmp_path / "blend.yaml"))
    (tmp_path / "run.yaml").write_text(f"model: {{rope_base: {written}}}\n")
    assert ingredient.value == parse_run_config(["--config", str(tmp_path / "run.yaml")]).model.rope_base == 1e12


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: 1", "must hold a list of sources"),
        ("- {", "is not valid YAML"),
        ("- jsonl", r"source 1 must be a mapping with some of source, path"),
        ("- {source: jsonl, weigth: 1}", r"source 1 has 'weigth'; it can have source, path, field, long, weight"),
        ("- {source: jsonl, weight: 1, weight: 2}", "is not valid YAML: weight is there twice, again in line 1; put"),
        ("[" * 5000, "is YAML nested too deep to be read"),
        ("- {source: csv, weight: 1}", "source 1 has source 'csv'; it is one of text, jsonl"),
        ("- {source: text, weight: 1, tokens: 2}", "needs one of weight, epochs, tokens, and has weight, tokens"),
        ("- {source: text}", "and has none"),
        ("- {source: text, weight: 0}", "has weight 0; it must be a number above 0"),
        ("- {source: text, weight: 1, long: {tokens: 3}}", "write it as {tokens: 65536, share: 0.6}"),
        ("- {source: text, weight: 1, long: {tokens: 3, share: 2}}", "has long.share 2.0; it is a share"),
        ("- {source: text, weight: 1}", "source 1 has path None, but source text needs a path; correct it."),
        ("- {source: text, path: x, field: a, weight: 1}", "has field 'a'; it is a text, for source jsonl, parquet"),
        ("- {source: jsonl, path: x, field: [a], weight: 1}", "has field ['a']; it is a text"),
        ("- {source: stdlib, path: x, weight: 1}", "has path 'x', but source stdlib takes no path; correct it."),
        ("- {source: stdlib, weight: 1}\n- {source: stdlib, epochs: 1}", "give weights to all or to none"),
    ],
)
def test_mistakes_are_sentences(tmp_path, content, said):
    (tmp_path / "blend.yaml").write_text(content)
    with pytest.raises(DataError) as refused:
        read_blend(str(tmp_path / "blend.yaml"))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("amounts", "said"),
    [
        (
            (("tokens", 1), ("epochs", 1)),
            "no document of its source 0, as it takes less than half of .* its tokens, 1.",
        ),
        ((("epochs", 1), ("epochs", 0.4)), "no document of its source 1, as it takes less than half of .* epochs, 0.4"),
        ((("tokens", 1e15), ("epochs", 1)), r"its source 0 385,\d{3},\d{3},\d{3} times; change its tokens, 1e\+15, or"),
        ((("weight", 1e-9), ("weight", 1e9)), "would use each document of its source 1 .* times; change its weight"),
    ],
)
def test_an_epoch_of_no_document_or_of_too_many_is_a_sentence(amounts, said):
    with pytest.raises(DataError, match=said):
        Corpus(blend(*((LENGTHS if number == 0 else [12], *each) for number, each in enumerate(amounts))), 100)


def test_a_share_of_long_documents_needs_some():
    with pytest.raises(DataError, match="has no documents on both sides of 1,000 tokens"):
        Corpus(blend((LENGTHS, "epochs", 1), long_tokens=1000, long_share=0.5), 100)
    with pytest.raises(DataError, match=r"no document of its source 0 on one side of 16 tokens, .* or change its long"):
        Corpus(blend((LENGTHS, "epochs", 1), long_tokens=16, long_share=1e-4), 100)
    with pytest.raises(DataError, match=r"cannot be read \(No such file"):
        read_blend("nowhere.yaml")
