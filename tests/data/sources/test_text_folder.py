from __future__ import annotations

import logging

import pytest

from distca.data import open_source
from distca.errors import DataError


def test_text_files_in_the_order_of_their_path(tmp_path, caplog):
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "z.TXT").write_bytes(b"zz")
    (tmp_path / "b" / "a.md").write_bytes("ü".encode())
    (tmp_path / "b.py").write_bytes(b"import x")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / ".secret.txt").write_bytes(b"no")
    (tmp_path / ".hidden" / "c.txt").write_bytes(b"no")
    (tmp_path / "link.txt").symlink_to(tmp_path / "z.TXT")
    with caplog.at_level(logging.INFO, logger="distca"):
        source = open_source("text", str(tmp_path))
    contents = [bytes(source.read(d, 0, int(n)).tolist()) for d, n in enumerate(source.lengths)]
    assert contents == [b"import x", "ü".encode(), b"zz"]
    assert source.vocabulary == 256
    assert "left out 1 empty file" in caplog.text
    assert "left out 2 files, hidden or without a text suffix" in caplog.text


def test_one_file_is_one_document(tmp_path):
    (tmp_path / "anything").write_bytes(b"0123456789")
    source = open_source("text", str(tmp_path / "anything"))
    assert source.lengths.tolist() == [10]
    assert bytes(source.read(0, 3, 6).tolist()) == b"345"


def test_files_that_another_source_reads_are_no_text(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(b"")
    (tmp_path / "parquet").mkdir()
    (tmp_path / "parquet" / "0.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"would be one document with `source` text; set `source` to jsonl, which"):
        open_source("text", str(tmp_path / "a.jsonl.gz"))
    with pytest.raises(DataError, match=r"holds no text file: .*; set `source` to parquet\.$"):
        open_source("text", str(tmp_path / "parquet"))
    with pytest.raises(DataError, match=r"takes no path, but `path` is 'a\.jsonl'; set `source` to jsonl\.$"):
        open_source("stdlib", "a.jsonl")


def test_a_missing_path_is_a_sentence(tmp_path):
    with pytest.raises(DataError, match=r"^`path` '.*nowhere' does not exist\.$"):
        open_source("text", str(tmp_path / "nowhere"))


def test_an_empty_folder_is_a_sentence(tmp_path):
    with pytest.raises(DataError, match=r"holds no text file: none of its 0 files"):
        open_source("text", str(tmp_path))


def test_a_folder_of_empty_files_is_a_sentence(tmp_path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match=r"holds no document: it has no text at all \(1 empty file\)"):
        open_source("text", str(tmp_path))


def test_a_file_that_shrinks_is_a_sentence(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"0123456789")
    source = open_source("text", str(tmp_path))
    file.write_bytes(b"01")
    with pytest.raises(DataError, match="became shorter while it was in use"):
        source.read(0, 0, 10)
