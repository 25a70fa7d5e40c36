"""The command that runs all GPU tests, here with two small files of tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu import all as all_gpu_tests
from tests.gpu.all import ALONE, BESIDE, Runs

FIRST = """
import os, pytest
def test_right(): assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
def test_wrong(): assert False
@pytest.mark.parametrize("a", ["a b"])
def test_left_out(a): pytest.skip("needs 3 GPUs")
def test_left_out_too(): pytest.skip("needs 3 GPUs")
"""
SECOND = """
import os, pytest
@pytest.mark.alone
def test_alone(): assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
def test_beside(): assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0"
"""
ENDLESS = """
import time
def test_short(): pass
def test_endless(): time.sleep(600)
def test_never(): pass
"""


def _files(folder: Path, **texts: str) -> list[Path]:
    for name, text in texts.items():
        (folder / f"test_{name}.py").write_text(text)
    return [folder / f"test_{name}.py" for name in texts]


def _kept(folder: Path) -> dict[str, dict[str, dict[str, object]]]:
    (path,) = folder.glob("gpu_tests_*.json")
    found: dict[str, dict[str, dict[str, object]]] = json.loads(path.read_text())["files"]
    return found


def test_what_failed_is_said_and_what_has_ended_does_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = _files(tmp_path, first=FIRST, second=SECOND)
    for ran in (3, 0):
        assert Runs(tmp_path / "out", 100, ["0", "1"]).run(files) == ["test_first, not alone: test_wrong"]
        assert capsys.readouterr().out.count("passed") == ran
    first, second = _kept(tmp_path / "out")["test_first"][BESIDE], _kept(tmp_path / "out")["test_second"]
    assert (first["passed"], first["failed"], first["not_reached"]) == (1, ["test_wrong"], 0)
    assert first["skipped"] == {"needs 3 GPUs": 2}
    assert [second[part]["passed"] for part in (BESIDE, ALONE)] == [1, 1]
    monkeypatch.setattr(all_gpu_tests, "_digest", lambda: "of other code")  # of the same commit, as before one is made
    assert len(Runs(tmp_path / "out", 0, ["0", "1"]).run(files)) == 3, "what the other code did is taken for this one's"


def test_time_that_is_over_ends_tests_which_are_named_as_not_reached(tmp_path: Path) -> None:
    files = _files(tmp_path, endless=ENDLESS, second=SECOND)
    assert Runs(tmp_path / "out", 4, ["0", "1"]).run(files) == [
        "test_endless, not alone: 2 not reached, exit code -15",
        "test_second, alone: all not reached, exit code None",
    ]
    assert _kept(tmp_path / "out")["test_endless"][BESIDE]["passed"] == 1
