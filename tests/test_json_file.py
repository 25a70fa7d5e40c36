"""JSON of others: regular files only, and nothing that has two meanings or none."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from distca.json_file import inside, read_json, read_object


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": 1, "a": 2}', "it has 'a' twice in one object"),
        (b'{"a": {"b": 1, "b": 1}}', "it has 'b' twice"),
        (b"[NaN]", "it has the number NaN"),
        (b"[-Infinity]", "it has the number -Infinity"),
        (b"[1e999]", "it has the number 1e999"),
        (b"[" * 100_000, "it is nested too deep"),
        (b'{"a":' * 100_000, "it is nested too deep"),
        (b"[" + b"9" * 5000 + b"]", "4300"),
        (b'["\\ud800"]', "half of a surrogate pair"),
        (b'{"\\uDC00": 1}', "half of a surrogate pair"),
        (b'"\xff"', "utf-8"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b"", "Expecting value"),
        (b"[1,]", ""),
    ],
)
def test_what_has_no_one_meaning_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(said)):
        read_json(tmp_path / "file")


def test_what_is_json_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"a": [1, 2.5, "\\ud83d\\ude00", "\\\\ud800", null]}')
    assert read_object(tmp_path / "file") == {"a": [1, 2.5, "😀", "\\ud800", None]}
    (tmp_path / "file").write_text("[]")
    with pytest.raises(ValueError, match="it holds a list, not an object"):
        read_object(tmp_path / "file")


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device", "."):
        with pytest.raises(OSError, match="it is no regular file"):
            read_json(tmp_path / name)
    (tmp_path / "file").write_text("1")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_json(tmp_path / "link") == 1


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\0", None, 1, "a/", "./a"])
def test_a_name_that_leads_out_of_a_folder_is_refused(tmp_path: Path, name: object) -> None:
    with pytest.raises(ValueError, match="which is no file of that folder"):
        inside(tmp_path, name)
    assert inside(tmp_path, "a") == tmp_path / "a"
