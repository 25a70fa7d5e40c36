from __future__ import annotations

import json
from dataclasses import dataclass
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distca.data import convert as module
from distca.data import open_source
from distca.data.cache import CachedTokens
from distca.data.convert import check_output, convert
from distca.data.recipe import Recipe, TextEncoder
from distca.data.texts import lines, open_texts
from distca.data.tokenizer import TokenizerFiles
from distca.errors import DataError

BYTES = Recipe(TokenizerFiles("bytes"))


class Words:
    """A tokenizer that drops documents without words: every word's id is its length."""

    def __init__(self, vocabulary=50):
        self.vocabulary = vocabulary

    def encode(self, documents):
        return [np.array([len(word) for word in document.decode().split()], dtype=np.int64) for document in documents]


@dataclass(frozen=True)
class With(Recipe):
    """A recipe with a tokenizer that is made here."""

    tokenizer: TokenizerFiles = BYTES.tokenizer
    made: Any = None

    def open(self):
        return TextEncoder(self.made)


WORDS = With(made=Words())


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").mkdir()
    for name, content in {"a.txt": "one three", "b.txt": "  ", "c.txt": "a bb ccc dddd"}.items():
        (tmp_path / "in" / name).write_text(content)
    return str(tmp_path / "in")


def test_what_is_written_reads_back(tmp_path, folder):
    source = open_source("text", folder)
    advanced = []
    done = convert(open_texts("text", folder), BYTES, str(tmp_path / "new" / "out"), advanced=advanced.append)
    back = open_source("indexed", str(tmp_path / "new" / "out"))
    assert back.lengths.tolist() == source.lengths.tolist() == [9, 2, 13]
    assert back.vocabulary == 256
    for document, length in enumerate(back.lengths.tolist()):
        assert back.read(document, 0, length).tolist() == source.read(document, 0, length).tolist()
    assert sum(advanced) == 24 == done.tokens
    assert (tmp_path / "new" / "out.bin").stat().st_size == 24
    said = json.loads((tmp_path / "new" / "out.json").read_text())
    assert len(said.pop("tokenizer_digest")) == 64
    assert said == {
        "tokenizer": "bytes",
        "vocabulary": 256,
        "documents": 3,
        "tokens": 24,
        "empty": 0,
        "bad": 0,
        "bad_named": [],
        "mask": False,
        "begin_token": None,
        "end_token": None,
        "field": "text",
    }


@pytest.mark.parametrize("vocabulary", [256, 257, 65537])
def test_megatron_reads_what_is_written(tmp_path, folder, vocabulary):
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    convert(open_texts("text", folder), With(made=Words(vocabulary)), str(tmp_path / "out"))
    dataset = megatron.IndexedDataset(str(tmp_path / "out"))
    assert [ids.tolist() for ids in dataset] == [[3, 5], [1, 2, 3, 4]]
    assert dataset.document_indices.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("vocabulary", "bytes_per_token"), [(256, 1), (257, 2), (65536, 2), (65537, 4)])
def test_ids_take_as_few_bytes_as_the_vocabulary_allows(tmp_path, folder, vocabulary, bytes_per_token):
    done = convert(open_texts("text", folder), With(made=Words(vocabulary)), str(tmp_path / "out"))
    assert (done.documents, done.tokens, done.empty) == (2, 6, 1)
    assert (tmp_path / "out.bin").stat().st_size == 6 * bytes_per_token
    assert open_source("indexed", str(tmp_path / "out")).read(1, 1, 4).tolist() == [2, 3, 4]


def test_nothing_is_overwritten(tmp_path, folder):
    (tmp_path / "out.idx").write_text("precious")
    with pytest.raises(DataError, match=r"out\.idx exists already; delete it or choose another output"):
        convert(open_texts("text", folder), BYTES, str(tmp_path / "out"))
    assert (tmp_path / "out.idx").read_text() == "precious"


def test_a_document_that_is_not_text_is_named_by_its_file(tmp_path, folder):
    (tmp_path / "in" / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"in/b\.txt is not UTF-8 text"):
        convert(open_texts("text", folder), WORDS, str(tmp_path / "out"))


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
    with pytest.raises(DataError, match=rf"{where} cannot be tokenized \(no ccc\); change"):
        convert(open_texts(kind, folder), With(made=Choosy()), str(tmp_path / "out"))


@pytest.mark.parametrize("processes", [1, 2])
def test_bad_documents_are_left_out_where_that_is_asked_for(tmp_path, monkeypatch, processes):
    """Also by processes of their own; a conversion that goes on has counted what came before."""
    monkeypatch.setattr(lines, "BLOCK_BYTES", 64)
    monkeypatch.setattr(module, "_SAVE_S", 0)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": 5}\n{"body": "a"}\n' * 20)
    texts, output = open_texts("jsonl", str(tmp_path / "a.jsonl")), str(tmp_path / "out")

    def broken_off(_):
        if Path(f"{output}.partial/done").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(texts, BYTES, output, bad="skip", advanced=broken_off)
    done = convert(texts, BYTES, output, bad="skip", processes=processes)
    assert (done.documents, done.bad, done.empty, len(done.bad_named)) == (20, 40, 0, 5)
    assert [str(each) for each in open_source("indexed", output).left_out] == [
        "40 documents that cannot be read or tokenized, the first of them: " + "; ".join(done.bad_named)
    ]
    assert [f"line {number}" in said for number, said in zip((2, 3, 5, 6, 8), done.bad_named, strict=True)] == [
        True
    ] * 5


def test_a_failed_conversion_leaves_nothing_and_can_be_repeated(tmp_path, folder):
    (tmp_path / "out.txt").write_text("precious")
    for tokenizer, error in ((Choosy(), DataError), (object(), AttributeError)):
        with pytest.raises(error):
            convert(open_texts("text", folder), With(made=tokenizer), str(tmp_path / "out"))
        assert sorted(file.name for file in tmp_path.iterdir()) == ["in", "out.txt"]
    convert(open_texts("text", folder), WORDS, str(tmp_path / "out"))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in", "out.bin", "out.idx", "out.json", "out.txt"]
    assert (tmp_path / "out.txt").read_text() == "precious"


def test_files_that_appear_meanwhile_are_kept(tmp_path, folder):
    appear = (tmp_path / "out.bin").write_text
    with pytest.raises(DataError, match=r"out\.bin exists already"):
        convert(open_texts("text", folder), WORDS, str(tmp_path / "out"), advanced=lambda _: appear("precious"))
    assert (tmp_path / "out.bin").read_text() == "precious"
    assert not (tmp_path / "out.idx").exists()


def test_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path, folder, monkeypatch):
    def full(self, *_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)  # the sidecar, once the others are written
    with pytest.raises(DataError, match=r"out\.bin cannot be written \(No space left on device\)"):
        convert(open_texts("text", folder), WORDS, str(tmp_path / "out"))
    assert [file.name for file in tmp_path.iterdir()] == ["in"]


def test_a_disk_that_is_full_for_what_is_left_too_keeps_nothing(tmp_path, folder, monkeypatch):
    add = module._Partial.add

    def add_to_full_files(partial, tokens, read):
        partial.close()
        partial._files |= {name: BufferedWriter(FileIO("/dev/full", "ab")) for name in ("bin", "lengths", "mask")}
        add(partial, tokens, read)

    monkeypatch.setattr(module._Partial, "add", add_to_full_files)
    with pytest.raises(DataError, match="No space left on device"):
        convert(open_texts("text", str(folder)), BYTES, str(tmp_path / "out"))
    assert not list(tmp_path.glob("out*"))


def test_a_file_that_is_gone_is_a_sentence(tmp_path, folder):
    source = open_texts("text", folder)
    (tmp_path / "in" / "c.txt").unlink()
    with pytest.raises(DataError, match=r"in/c\.txt cannot be read \(No such file or directory\)"):
        convert(source, WORDS, str(tmp_path / "out"))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_suffix_is_taken_off(tmp_path, folder, suffix):
    convert(open_texts("text", folder), WORDS, str(tmp_path / f"out{suffix}"))
    assert open_source("indexed", str(tmp_path / f"out{suffix}")).lengths.tolist() == [2, 4]


@pytest.mark.parametrize("output", ["", "{}/", ".bin", "{}/.idx", "{}/."])
def test_an_output_without_a_name_is_refused(tmp_path, folder, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="names no file; give the path"):
        convert(open_texts("text", folder), WORDS, output.format(tmp_path))
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
    with pytest.raises(DataError, match="made no token to learn of 1 document;"):
        convert(open_texts("text", str(tmp_path)), WORDS, str(tmp_path / "out"))
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]


@pytest.fixture
def many(tmp_path, monkeypatch):
    """JSON Lines in many blocks, whose progress is noted after each."""
    monkeypatch.setattr(lines, "BLOCK_BYTES", 64)
    monkeypatch.setattr(module, "_SAVE_S", -1.0)
    file = tmp_path / "many.jsonl"
    file.write_text("".join(json.dumps({"text": "ab " * (number % 5) + str(number)}) + "\n" for number in range(60)))
    return open_texts("jsonl", str(file))


def written(prefix):
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx", ".json")]


class Interrupt:
    """Interrupts after some blocks; counts what is encoded."""

    def __init__(self, after):
        self.left, self.bytes = after, []

    def __call__(self, size):
        self.bytes.append(size)
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def test_what_was_interrupted_goes_on_where_it_was(tmp_path, many):
    convert(many, WORDS, str(tmp_path / "whole"))
    broken_off = Interrupt(9)
    with pytest.raises(KeyboardInterrupt):
        convert(many, WORDS, str(tmp_path / "out"), advanced=broken_off)
    with (tmp_path / "out.partial" / "bin").open("ab") as file:
        file.write(b"what was written after the last note")
    rest = Interrupt(10**9)
    convert(many, WORDS, str(tmp_path / "out"), advanced=rest)
    assert written(tmp_path / "out") == written(tmp_path / "whole")
    assert rest.bytes[0] == sum(broken_off.bytes), "the first part is not done again"
    assert sum(rest.bytes) == many.bytes
    assert not (tmp_path / "out.partial").exists()


@dataclass(frozen=True)
class Masked(With):
    """Every second token is to be learned."""

    def open(self):
        return MaskedEncoder(self.made)


class MaskedEncoder(TextEncoder):
    def encode(self, values):
        return [(ids, np.arange(len(ids)) % 2 == 0) for ids, _ in super().encode(values)]


def killed_after_renames(patch, count):
    """Nothing is done any more once so many files are where they belong."""
    rename, moved = Path.rename, []

    def renamed(file, target):
        if len(moved) == count:
            raise KeyboardInterrupt
        moved.append(file)
        return rename(file, target)

    patch.setattr(Path, "rename", renamed)


MASKED = Masked(made=Words())


@pytest.mark.parametrize(
    ("recipe", "count"), [(WORDS, 0), (WORDS, 1), (WORDS, 2), *((MASKED, count) for count in range(4))]
)
def test_what_is_killed_while_files_are_moved_goes_on(tmp_path, many, monkeypatch, recipe, count):
    convert(many, recipe, str(tmp_path / "whole"))
    with monkeypatch.context() as patch:
        killed_after_renames(patch, count)
        with pytest.raises(KeyboardInterrupt):
            convert(many, recipe, str(tmp_path / "out"))
    placed = {file.suffix for file in tmp_path.glob("out.*")} - {".partial"}
    assert len(placed) == count and ".idx" not in placed
    rest = Interrupt(10**9)
    convert(many, recipe, str(tmp_path / "out"), advanced=rest)
    assert rest.bytes == [many.bytes], "nothing is done again"
    assert written(tmp_path / "out") == written(tmp_path / "whole")
    masks = [file.read_bytes() for file in sorted(tmp_path.glob("*.mask"))]
    assert len(masks) == (2 if recipe is MASKED else 0) and len(set(masks)) < 2
    assert not (tmp_path / "out.partial").exists()


def test_after_a_kill_the_same_is_found_in_a_cache_and_a_finished_corpus_is_kept(tmp_path, many, monkeypatch):
    cached = CachedTokens(tmp_path / "cache", many, WORDS)
    with monkeypatch.context() as patch:
        killed_after_renames(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            cached.make(1)
    prefix = cached.make(1)
    convert(many, WORDS, str(tmp_path / "whole"))
    assert written(prefix) == written(tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *_, **__: Interrupt(0)(1))
        with pytest.raises(KeyboardInterrupt):
            convert(many, WORDS, str(tmp_path / "out"))
    with pytest.raises(DataError, match=r"out\.json exists already"):
        convert(many, WORDS, str(tmp_path / "out"))
    assert written(tmp_path / "out") == written(tmp_path / "whole")


def test_after_a_kill_only_its_own_files_are_overwritten(tmp_path, many, monkeypatch):
    with monkeypatch.context() as patch:
        killed_after_renames(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            convert(many, WORDS, str(tmp_path / "out"))
    (tmp_path / "out.bin").write_text("precious")
    with pytest.raises(DataError, match=r"out\.bin exists already"):
        convert(many, WORDS, str(tmp_path / "out"))
    (tmp_path / "out.bin").unlink()
    many.files[0].write_text('{"text": "something new"}')
    convert(many, WORDS, str(tmp_path / "out"))
    convert(many, WORDS, str(tmp_path / "whole"))
    assert written(tmp_path / "out") == written(tmp_path / "whole")


def test_files_that_cannot_be_moved_leave_nothing(tmp_path, folder, monkeypatch):
    rename = Path.rename

    def full(file, target):
        if file.name == "bin":
            raise OSError(28, "No space left on device")
        return rename(file, target)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(DataError, match=r"out\.bin cannot be written \(No space left on device\)"):
        convert(open_texts("text", folder), WORDS, str(tmp_path / "out"))
    assert [file.name for file in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("change", ["text", "tokenizer"])
def test_what_was_begun_of_something_else_is_not_gone_on_with(tmp_path, many, change):
    with pytest.raises(KeyboardInterrupt):
        convert(many, WORDS, str(tmp_path / "out"), advanced=Interrupt(9))
    recipe = WORDS
    if change == "text":
        many.files[0].write_text('{"text": "new"}')
    else:
        recipe = With(TokenizerFiles("bytes", end="</s>"), made=Words())
    convert(many, recipe, str(tmp_path / "out"))
    convert(many, recipe, str(tmp_path / "whole"))
    assert written(tmp_path / "out") == written(tmp_path / "whole")


def test_only_one_process_writes(tmp_path, many):
    def second(_):
        with pytest.raises(DataError, match=r"Another process is writing .*out\.bin; wait"):
            convert(many, WORDS, str(tmp_path / "out"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(many, WORDS, str(tmp_path / "out"), advanced=second)


def test_processes_write_the_same(tmp_path, many):
    convert(many, BYTES, str(tmp_path / "one"))
    advanced = []
    convert(many, BYTES, str(tmp_path / "two"), processes=2, advanced=advanced.append)
    assert written(tmp_path / "one") == written(tmp_path / "two")
    assert sum(advanced) == many.bytes
    many.files[0].write_text('{"text": "fine"}\n' * 30 + "{}\n")
    with pytest.raises(DataError, match=r"many\.jsonl, line 31: this JSON object has no \"text\"; its fields are none"):
        convert(many, BYTES, str(tmp_path / "three"), processes=2)
    assert not (tmp_path / "three.partial").exists()
