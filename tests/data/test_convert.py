from __future__ import annotations

import json

import numpy as np
import pytest

from distca.data import DataError, open_source
from distca.data.convert import convert
from distca.data.tokenizer import ByteTokenizer

pytest.importorskip("megatron.core.datasets.indexed_dataset")


class Words:
    """A tokenizer that drops documents without words: every word's id is its length."""

    def __init__(self, vocabulary=50):
        self.vocabulary = vocabulary

    def encode(self, documents):
        return [np.array([len(word) for word in document.decode().split()], dtype=np.int64) for document in documents]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").mkdir()
    for name, content in {"a.txt": "one three", "b.txt": "  ", "c.txt": "a bb ccc dddd"}.items():
        (tmp_path / "in" / name).write_text(content)
    return str(tmp_path / "in")


def test_what_is_written_reads_back(tmp_path, folder):
    source = open_source("text", folder)
    advanced = []
    done = convert(source, ByteTokenizer(), "bytes", str(tmp_path / "new" / "out"), advanced.append)
    back = open_source("indexed", str(tmp_path / "new" / "out"))
    assert back.lengths.tolist() == source.lengths.tolist() == [9, 2, 13]
    assert back.vocabulary == 256
    for document, length in enumerate(back.lengths.tolist()):
        assert back.read(document, 0, length).tolist() == source.read(document, 0, length).tolist()
    assert sum(advanced) == 24 == done.tokens
    assert (tmp_path / "new" / "out.bin").stat().st_size == 24
    assert json.loads((tmp_path / "new" / "out.json").read_text()) == {
        "tokenizer": "bytes",
        "vocabulary": 256,
        "documents": 3,
        "tokens": 24,
        "empty": 0,
    }


@pytest.mark.parametrize(("vocabulary", "bytes_per_token"), [(256, 1), (257, 2), (65536, 2), (65537, 4)])
def test_ids_take_as_few_bytes_as_the_vocabulary_allows(tmp_path, folder, vocabulary, bytes_per_token):
    done = convert(open_source("text", folder), Words(vocabulary), "words", str(tmp_path / "out"))
    assert (done.documents, done.tokens, done.empty) == (2, 6, 1)
    assert (tmp_path / "out.bin").stat().st_size == 6 * bytes_per_token
    assert open_source("indexed", str(tmp_path / "out")).read(1, 1, 4).tolist() == [2, 3, 4]


def test_nothing_is_overwritten(tmp_path, folder):
    (tmp_path / "out.idx").write_text("precious")
    with pytest.raises(DataError, match=r"out\.idx exists already; delete it or choose another output"):
        convert(open_source("text", folder), ByteTokenizer(), "bytes", str(tmp_path / "out"))
    assert (tmp_path / "out.idx").read_text() == "precious"


def test_a_document_that_is_not_text_is_named(tmp_path, folder):
    (tmp_path / "in" / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="Document 1 of the source is not UTF-8 text"):
        convert(open_source("text", folder), Words(), "words", str(tmp_path / "out"))


def test_a_corpus_without_tokens_leaves_no_file(tmp_path):
    (tmp_path / "a.txt").write_text("   ")
    with pytest.raises(DataError, match="all 1 documents into no token"):
        convert(open_source("text", str(tmp_path)), Words(), "words", str(tmp_path / "out"))
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]
