from __future__ import annotations

import json

import numpy as np
import pytest

from distca.data import open_source
from distca.data.convert import check_output, convert
from distca.data.tokenizer import ByteTokenizer
from distca.errors import DataError


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


@pytest.mark.parametrize("vocabulary", [256, 257, 65537])
def test_megatron_reads_what_is_written(tmp_path, folder, vocabulary):
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    convert(open_source("text", folder), Words(vocabulary), "words", str(tmp_path / "out"))
    dataset = megatron.IndexedDataset(str(tmp_path / "out"))
    assert [ids.tolist() for ids in dataset] == [[3, 5], [1, 2, 3, 4]]
    assert dataset.document_indices.tolist() == [0, 1, 2]


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


def test_a_document_that_is_not_text_is_named_by_its_file(tmp_path, folder):
    (tmp_path / "in" / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"in/b\.txt is not UTF-8 text"):
        convert(open_source("text", folder), Words(), "words", str(tmp_path / "out"))


class Choosy(Words):
    def encode(self, documents):
        if any(b"ccc" in document for document in documents):
            raise ValueError("no ccc")
        return super().encode(documents)


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_what_the_tokenizer_says_comes_with_the_place(tmp_path, folder, kind):
    file = tmp_path / "in" / "a.jsonl"
    file.write_text('{"text": "a"}\n\n{"text": ""}\n{"text": "ccc"}\n')
    where = r"in/c\.txt" if kind == "text" else r"in/a\.jsonl, line 4"
    with pytest.raises(DataError, match=f"{where} cannot be tokenized: the tokenizer says 'no ccc'; change"):
        convert(open_source(kind, folder), Choosy(), "choosy", str(tmp_path / "out"))


def test_a_failed_conversion_leaves_nothing_and_can_be_repeated(tmp_path, folder):
    (tmp_path / "out.txt").write_text("precious")
    for tokenizer, error in ((Choosy(), DataError), (object(), AttributeError)):
        with pytest.raises(error):
            convert(open_source("text", folder), tokenizer, "wrong", str(tmp_path / "out"))
        assert sorted(file.name for file in tmp_path.iterdir()) == ["in", "out.txt"]
    convert(open_source("text", folder), Words(), "words", str(tmp_path / "out"))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in", "out.bin", "out.idx", "out.json", "out.txt"]
    assert (tmp_path / "out.txt").read_text() == "precious"


def test_files_that_appear_meanwhile_are_kept(tmp_path, folder):
    appear = (tmp_path / "out.bin").write_text
    with pytest.raises(DataError, match=r"out\.bin exists already"):
        convert(open_source("text", folder), Words(), "words", str(tmp_path / "out"), lambda _: appear("precious"))
    assert (tmp_path / "out.bin").read_text() == "precious"
    assert not (tmp_path / "out.idx").exists()


def test_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path, folder, monkeypatch):
    def full(self, *_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)  # the sidecar, once the others are written
    with pytest.raises(DataError, match=r"out\.bin cannot be written \(No space left on device\)"):
        convert(open_source("text", folder), Words(), "words", str(tmp_path / "out"))
    assert [file.name for file in tmp_path.iterdir()] == ["in"]


def test_a_file_that_is_gone_is_a_sentence(tmp_path, folder):
    source = open_source("text", folder)
    (tmp_path / "in" / "c.txt").unlink()
    with pytest.raises(DataError, match=r"in/c\.txt cannot be read \(No such file or directory\)"):
        convert(source, Words(), "words", str(tmp_path / "out"))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_suffix_is_taken_off(tmp_path, folder, suffix):
    convert(open_source("text", folder), Words(), "words", str(tmp_path / f"out{suffix}"))
    assert open_source("indexed", str(tmp_path / f"out{suffix}")).lengths.tolist() == [2, 4]


@pytest.mark.parametrize("output", ["", "{}/", ".bin", "{}/.idx", "{}/."])
def test_an_output_without_a_name_is_refused(tmp_path, folder, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="names no file; give the path"):
        convert(open_source("text", folder), Words(), "words", output.format(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("output", ["{}/in/a.txt/x", "{}/in/a.txt/deep/x", "/proc/x", "{}/" + 300 * "x"])
def test_an_output_that_cannot_be_written_is_a_sentence(tmp_path, folder, output):
    with pytest.raises(DataError, match=r"\.bin cannot be written \(.*\); choose another output"):
        check_output(output.format(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["in"]


def test_a_file_in_place_of_the_folder_is_named(tmp_path, folder):
    with pytest.raises(DataError, match=r"x\.bin cannot be written \(.*/in/a\.txt is no folder\)"):
        check_output(f"{folder}/a.txt/x")


def test_a_corpus_without_tokens_leaves_no_file(tmp_path):
    (tmp_path / "a.txt").write_text("   ")
    with pytest.raises(DataError, match="all 1 documents into no token"):
        convert(open_source("text", str(tmp_path)), Words(), "words", str(tmp_path / "out"))
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]
