from __future__ import annotations

import os
import subprocess
import sys

import pytest

from distca.data import open_source
from distca.data.texts import open_texts
from distca.errors import DataError


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(DataError) as error:
        open_source("parquet", "x")
    assert str(error.value) == (
        "There is no document source 'parquet'; `source` is one of stdlib, text, jsonl, indexed, mix."
    )


@pytest.mark.parametrize("kind", ["text", "jsonl", "indexed", "mix"])
def test_a_source_without_a_path_is_refused(kind):
    with pytest.raises(DataError, match=r"needs a path; set `path`"):
        open_source(kind)


@pytest.mark.parametrize("kind", ["stdlib", "text", "jsonl"])
def test_another_tokenizer_than_bytes_points_to_the_conversion(kind):
    with pytest.raises(DataError, match=rf"distca data convert --source {kind} --path here --tokenizer t\.json"):
        open_source(kind, "here", "t.json")


def test_another_vocabulary_than_256_is_refused_for_bytes(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"vocabulary is 256, but `vocabulary` is 300"):
        open_source("text", str(tmp_path), vocabulary=300)
    assert open_source("text", str(tmp_path), vocabulary=0).vocabulary == 256


def test_a_negative_vocabulary_is_refused():
    with pytest.raises(DataError, match=r"`vocabulary`.*not -1"):
        open_source("mix", "pretrain", vocabulary=-1)


def test_what_cannot_be_read_is_named_and_not_left_out(tmp_path, monkeypatch):
    """Neither a folder below that of the texts, whose files would be missing, nor a file, then or later."""
    (tmp_path / "texts" / "locked").mkdir(parents=True)
    for name in ("texts/a.txt", "b.jsonl"):
        (tmp_path / name).write_text('{"text": "abc"}\n')
    sources = [open_source("text", str(tmp_path / "texts")), open_source("jsonl", str(tmp_path / "b.jsonl"))]
    (tmp_path / "texts" / "a.txt").unlink()
    (tmp_path / "b.jsonl").unlink()
    for source, name in zip(sources, (r"texts/a\.txt", r"b\.jsonl"), strict=True):
        with pytest.raises(DataError, match=rf"{name} cannot be read \(No such file or directory\); make it readable"):
            source.read(0, 0, 2)

    def locked(path):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", locked)
    for opened in (open_source, open_texts):
        with pytest.raises(DataError, match=r"texts/locked cannot be read \(Permission denied\); make it readable"):
            opened("text" if opened is open_source else "parquet", str(tmp_path / "texts"))


def test_stdlib_takes_no_path():
    with pytest.raises(DataError, match=r"takes no path, but `path` is 'x'"):
        open_source("stdlib", "x")


def test_data_and_its_command_import_numpy_only():
    code = (
        "import sys, distca.data, distca.data.cache, distca.commands.data\n"
        "assert not {'torch', 'megatron', 'tokenizers', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
