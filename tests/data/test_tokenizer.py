from __future__ import annotations

import builtins

import pytest

from distca.data.tokenizer import open_tokenizer
from distca.errors import DataError


@pytest.fixture
def tokenizer_file(tmp_path):
    """A word-level tokenizer with a template that would add <s>, made here."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "one": 3, "two": 4, "three": 7}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_bytes():
    tokenizer = open_tokenizer("bytes")
    assert tokenizer.vocabulary == 256
    assert [ids.tolist() for ids in tokenizer.encode([b"a\xff", b""])] == [[97, 255], []]


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_tokenizer_file_or_its_folder(tokenizer_file, as_folder):
    tokenizer = open_tokenizer(str(tokenizer_file.parent if as_folder else tokenizer_file))
    assert tokenizer.vocabulary == 8  # the greatest id is 7, ids 5 and 6 are unused
    assert [ids.tolist() for ids in tokenizer.encode([b"one three", b"two huh"])] == [[3, 7], [4, 0]]


def test_lengths_of_batches_that_a_file_carries_are_not_applied(tokenizer_file):
    tokenizers = pytest.importorskip("tokenizers")
    stored = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    stored.enable_truncation(2)
    stored.enable_padding(length=4)
    stored.save(str(tokenizer_file))
    ids = open_tokenizer(str(tokenizer_file)).encode([b"one two three", b"two"])
    assert [document.tolist() for document in ids] == [[3, 4, 7], [4]]


def test_the_words_of_the_model_come_as_a_value_error(tokenizer_file):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"one": 0}, unk_token="[UNK]")).save(str(tokenizer_file))
    with pytest.raises(ValueError, match=r"Missing \[UNK\] token"):
        open_tokenizer(str(tokenizer_file)).encode([b"two"])


def test_an_end_token_closes_every_document(tokenizer_file):
    tokenizer = open_tokenizer(str(tokenizer_file), "</s>")
    assert [ids.tolist() for ids in tokenizer.encode([b"one", b"two"])] == [[3, 2], [4, 2]]
    with pytest.raises(DataError, match="no token '<end>'"):
        open_tokenizer(str(tokenizer_file), "<end>")
    with pytest.raises(DataError, match="leave end_token unset"):
        open_tokenizer("bytes", "</s>")


def test_a_missing_or_damaged_file_is_a_sentence(tmp_path, tokenizer_file):
    with pytest.raises(DataError, match=r"neither 'bytes' nor a tokenizer\.json file"):
        open_tokenizer(str(tmp_path / "nothing"))
    for content in ("{", "{}"):
        tokenizer_file.write_text(content)
        with pytest.raises(DataError, match=r"is not a tokenizer\.json that the package tokenizers can read"):
            open_tokenizer(str(tokenizer_file))


def test_without_the_package_there_is_a_sentence(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *arguments, **options)

    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match="needs the package tokenizers: pip install tokenizers"):
        open_tokenizer(str(tmp_path))
