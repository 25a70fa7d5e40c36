from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.data import open_source
from distca.errors import DataError


def write(file, texts, **options):
    file.write_text("".join(json.dumps({"id": 1, "text": text}, **options) + "\n" for text in texts), encoding="utf-8")
    return str(file)


def contents(source):
    return [bytes(source.read(d, 0, int(n)).tolist()).decode() for d, n in enumerate(source.lengths)]


@settings(max_examples=30)
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1), escaped=st.booleans())
def test_texts_come_back_whole_and_in_slices(tmp_path_factory, texts, escaped):
    source = open_source("jsonl", write(tmp_path_factory.mktemp("j") / "a.jsonl", texts, ensure_ascii=escaped))
    assert contents(source) == texts
    content = texts[-1].encode()
    assert bytes(source.read(len(texts) - 1, 0, len(content) // 2).tolist()) == content[: len(content) // 2]


def test_a_folder_is_its_jsonl_files_by_name(tmp_path, caplog):
    write(tmp_path / "b.jsonl", ["third"])
    write(tmp_path / "a.jsonl", ["first", "", "second"])
    (tmp_path / "c.txt").write_text("no")
    (tmp_path / "below").mkdir()
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("\n  \n")
    with caplog.at_level(logging.INFO, logger="distca"):
        source = open_source("jsonl", str(tmp_path))
        open_source("jsonl", str(tmp_path))
    assert contents(source) == ["first", "second", "third"]
    assert "left out 1 empty document" in caplog.text
    assert caplog.text.count("left out 1 file and 1 folder; only files right in it") == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut o', "not valid JSON"),
        (b'{"text": "\xff"}', "not valid JSON"),
        (b'["text"]', 'not a JSON object with a "text" string'),
        (b'{"body": "x"}', 'this JSON object has no "text"; its fields are body'),
        (b'{"messages": []}', "its fields are messages; for conversations set `conversations` to true"),
        (b'{"text": 3}', 'not a JSON object with a "text" string'),
        (b'{"text": "\\ud800"}', "unpaired surrogate"),
        (b"[" * 200_000 + b"]" * 200_000, "nested too deep"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, reason):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine"}\n')
    is_json = "valid JSON" not in reason and "nested" not in reason
    another = ", name another `field`" if is_json else ""
    with pytest.raises(
        DataError, match=rf"a\.jsonl, line 3: .*{reason}.*; correct or delete the line{another}, or set"
    ):
        open_source("jsonl", str(file))


def test_documents_are_found_by_file_and_line(tmp_path):
    write(tmp_path / "a.jsonl", ["", "first"])
    write(tmp_path / "b.jsonl", ["second"])
    source = open_source("jsonl", str(tmp_path))
    assert [source.where(0), source.where(1)] == [f"{tmp_path}/a.jsonl, line 2", f"{tmp_path}/b.jsonl, line 1"]


def test_missing_and_empty_paths_are_sentences(tmp_path):
    with pytest.raises(DataError, match=r"`path` '.*nowhere' does not exist"):
        open_source("jsonl", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"holds no \.jsonl file"):
        open_source("jsonl", str(tmp_path))
    with pytest.raises(DataError, match=r"holds no document with text \(1 line with an empty one\)"):
        open_source("jsonl", write(tmp_path / "a.jsonl", [""]))


def test_a_file_that_changes_is_a_sentence(tmp_path):
    path = write(tmp_path / "a.jsonl", ["first", "second"])
    source = open_source("jsonl", path)
    write(tmp_path / "a.jsonl", ["1", "2"])
    with pytest.raises(DataError, match="changed while it was in use"):
        source.read(1, 0, 3)
