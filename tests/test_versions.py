from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from distca.versions import command_line, header, write_report


def test_a_report_says_how_and_with_what_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["made.py", "--output", "two words"])
    write_report(tmp_path / "new" / "made.json", {**header(command_line("python made.py"), 3), "seconds": 1.5})
    report = json.loads((tmp_path / "new" / "made.json").read_text())
    assert list(report) == ["command", "hardware", "versions", "seconds"]
    assert report["command"] == "python made.py --output 'two words'"
    assert report["hardware"].startswith("3 ") and "numpy" in report["versions"]


def test_a_command_without_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["made.py"])
    assert command_line("python made.py") == "python made.py"
