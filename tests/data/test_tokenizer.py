from __future__ import annotations

import builtins
import json

import pytest

from distca.data.tokenizer import find_tokenizer
from distca.errors import DataError, VersionError


def open_tokenizer(*arguments):
    return find_tokenizer(*arguments).open()


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
    tokenizer = open_tokenizer(str(tokenizer_file), None, "</s>")
    assert [ids.tolist() for ids in tokenizer.encode([b"one", b"two"])] == [[3, 2], [4, 2]]
    with pytest.raises(DataError, match="no token '<end>'"):
        open_tokenizer(str(tokenizer_file), None, "<end>")
    with pytest.raises(DataError, match="leave `end_token` unset"):
        open_tokenizer("bytes", None, "</s>")


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
    with pytest.raises(VersionError, match="needs the package tokenizers: pip install tokenizers"):
        open_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("said", "given", "ids"),
    [
        ({"bos_token": "<s>", "eos_token": "</s>"}, (None, None), [1, 3, 2]),  # the file's own template puts <s> first
        ({"bos_token": {"content": "<s>"}, "eos_token": None}, (None, None), [1, 3]),
        ({"bos_token": "</s>", "eos_token": "</s>"}, (None, None), [3, 2]),  # </s> is not what the template puts first
        ({"bos_token": "</s>", "add_bos_token": True}, (None, None), [2, 3]),
        ({"bos_token": "<s>", "add_bos_token": False}, (None, "two"), [3, 4]),
        ({"bos_token": "<s>", "eos_token": "</s>"}, ("", ""), [3]),
        ({}, (None, None), [3]),
    ],
)
def test_a_folder_says_how_documents_begin_and_end(tokenizer_file, said, given, ids):
    (tokenizer_file.parent / "tokenizer_config.json").write_text(json.dumps(said))
    (document,) = open_tokenizer(str(tokenizer_file.parent), *given).encode([b"one"])
    assert document.tolist() == ids


@pytest.mark.parametrize(
    ("said", "beside", "ids"),
    [
        ({}, {"bos_token": "<s>", "eos_token": {"content": "</s>"}}, [1, 3, 2]),
        ({"eos_token": None}, {"eos_token": "</s>"}, [3, 2]),
        ({"eos_token": "two"}, {"eos_token": "</s>"}, [3, 4]),
    ],
)
def test_tokens_that_only_the_special_tokens_map_names_count_too(tokenizer_file, said, beside, ids):
    (tokenizer_file.parent / "tokenizer_config.json").write_text(json.dumps(said))
    (tokenizer_file.parent / "special_tokens_map.json").write_text(json.dumps(beside))
    (document,) = open_tokenizer(str(tokenizer_file.parent)).encode([b"one"])
    assert document.tolist() == ids


def test_control_tokens_in_a_text_stay_text(tokenizer_file):
    tokenizers = pytest.importorskip("tokenizers")
    stored = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    stored.add_special_tokens(["</s>"])
    stored.save(str(tokenizer_file))
    assert stored.encode("one </s> two", add_special_tokens=False).ids == [3, 2, 4], "as a control token it would be 2"
    (document,) = open_tokenizer(str(tokenizer_file)).encode([b"one </s> two"])
    assert 2 not in document.tolist() and document.tolist()[0] == 3 and document.tolist()[-1] == 4
