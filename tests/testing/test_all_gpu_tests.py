"""The command that runs all GPU tests, here with small files of tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import all as all_gpu_tests
from tests.gpu.all import ALONE, BESIDE, Runs

FIRST = """
import os, pytest
def test_right(): assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2"
def test_wrong(): assert False
@pytest.mark.parametrize("a", ["a b"])
def test_left_out(a): pytest.skip("needs 3 GPUs")
def test_left_out_too(): pytest.skip("needs 3 GPUs")
"""
SECOND = """
import os, pytest
@pytest.mark.alone
def test_alone(): assert os.environ["CUDA_VISIBLE_DEVICES"] in ("0,1", "2")
def test_beside(): assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,2,0"
"""
DIES = """
import os, pathlib
def test_short(): pass
def test_that_dies(): os._exit(3)
def test_behind(): pass
"""
ENDLESS = """
import time
from pathlib import Path
def test_short(): pass
def test_endless(): time.sleep(0 if Path(__file__).with_name("go").exists() else 600)
def test_never(): pass
"""


@pytest.fixture(autouse=True)
def _only_plugins_that_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others take longer to import than these tests run."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout")


def _files(folder: Path, **texts: str) -> list[Path]:
    for name, text in texts.items():
        (folder / f"test_{name}.py").write_text(text)
    return [folder / f"test_{name}.py" for name in texts]


def _kept(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    (path,) = folder.glob("gpu_tests_*.json")
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(path.read_text())["files"]
    return found


def test_what_failed_is_said_and_what_has_ended_does_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = _files(tmp_path, first=FIRST, second=SECOND, dies=DIES)
    wrong = ["test_dies, not alone: test_that_dies", "test_first, not alone: test_wrong"]
    assert Runs(tmp_path / "out", 100, ["0", "1", "2"]).run(files) == wrong
    first, second = _kept(tmp_path / "out")["test_first"][BESIDE], _kept(tmp_path / "out")["test_second"]
    assert (first["passed"], first["failed"], first["not_reached"]) == (1, ["test_wrong"], [])
    assert first["skipped"] == {"needs 3 GPUs": 2}
    assert [second[part]["passed"] for part in (BESIDE, ALONE)] == [1, 1]
    assert _kept(tmp_path / "out")["test_dies"][BESIDE]["passed"] == 2
    with monkeypatch.context() as patched:
        patched.setattr(Runs, "_code", None)  # nothing runs again
        assert Runs(tmp_path / "out", 100, ["0", "1", "2"]).run(files) == wrong
    monkeypatch.setattr(all_gpu_tests, "_digest", lambda: "of other code")  # of the same commit, as before one is made
    assert len(Runs(tmp_path / "out", 0, ["0", "1"]).run(files)) == 4, "what the other code did is taken for this one's"


def test_time_that_is_over_ends_tests_and_the_same_command_goes_on_with_them(tmp_path: Path) -> None:
    files = _files(tmp_path, endless=ENDLESS)
    assert Runs(tmp_path / "out", 4, ["0", "1"]).run(files) == [
        "test_endless, not alone: not reached: test_endless, test_never, exit code -15"
    ]
    log = next((tmp_path / "out").glob("*/test_endless, not alone.log"))
    assert "in test_endless" in log.read_text(), "the stack"
    (tmp_path / "go").touch()
    assert Runs(tmp_path / "out", 100, ["0", "1"]).run(files) == []
    assert _kept(tmp_path / "out")["test_endless"][BESIDE]["passed"] == 3
    assert log.read_text().count("test_short PASSED") == 1
