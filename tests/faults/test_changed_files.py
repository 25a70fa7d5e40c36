"""A sample of changed files: each ends in a sentence or in what the file holds; and whole ones are read."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

from distca.data.texts import open_texts
from distca.errors import DataError, ModelError
from distca.models.tensors import INDEX, TensorFiles
from tests.faults.changed_files import run_cases
from tests.faults.changed_folders import QUICK, SUBJECTS, prepare


def test_a_sample_of_changed_files() -> None:
    found = run_cases(28, 7, QUICK, workers=1)
    assert [each for each in found if each["ended"] == "failed"] == []
    assert {each["ended"] for each in found} == {"read", "sentence"}


def test_whole_files_are_read(tmp_path: Path) -> None:
    prepare(tmp_path, QUICK)
    for subject in SUBJECTS:
        if subject.name in QUICK:
            for folder in sorted((tmp_path / subject.name).iterdir()):
                assert subject.read(folder)


def test_an_offset_that_leads_out_of_an_arrow_file_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"text": ["one", "two", "three"]})
    with pyarrow.ipc.new_stream(tmp_path / "data.arrow", table.schema) as stream:
        stream.write_table(table)
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    content, offsets = (tmp_path / "data.arrow").read_bytes(), struct.pack("<4i", 0, 3, 6, 11)
    assert content.count(offsets) == 1
    (tmp_path / "data.arrow").write_bytes(content.replace(offsets, struct.pack("<4i", 0, 3, 6, 1 << 20)))
    with pytest.raises(DataError, match=r"data\.arrow is no Arrow file that can be read \(.*out of bounds"):
        list(open_texts("arrow", str(tmp_path)).blocks("text"))


@pytest.mark.parametrize("name", ["../data.arrow", "/etc/passwd", "..", "", None, "a/../data.arrow"])
def test_a_saved_folder_names_only_its_own_files(tmp_path: Path, name: str | None) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(DataError, match=r"state\.json is missing or damaged"):
        open_texts("arrow", str(tmp_path))


def test_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "weights")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "weights"}}))
    with pytest.raises(ModelError, match=r"weights cannot be read \(it is no regular file\)"):
        TensorFiles(tmp_path).dtype("a")
    (tmp_path / INDEX).unlink()
    os.mkfifo(tmp_path / INDEX)
    with pytest.raises(ModelError, match=r"index\.json cannot be read \(it is no regular file\)"):
        TensorFiles(tmp_path)
