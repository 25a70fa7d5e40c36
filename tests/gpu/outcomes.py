"""A plugin of pytest that keeps each test's outcome at once, so that a run that is cut goes on where it was.

    DISTCA_OUTCOMES=FILE.jsonl pytest -p tests.gpu.outcomes ...

Tests whose outcome FILE has are left out. On SIGUSR1 all threads write to stderr where they are.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "DISTCA_OUTCOMES"
TIME_IS_OVER = "time is over"
"""The reason why a test is skipped that has not been reached; it has no outcome then."""
_STDERR = os.dup(2)  # pytest puts a file in its place later


def pytest_configure() -> None:
    faulthandler.register(signal.SIGUSR1, file=_STDERR)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ended = Outcomes(_path()).ended
    append(_path(), {"tests": [_name(item.nodeid) for item in items]})
    config.hook.pytest_deselected(items=[item for item in items if _name(item.nodeid) in ended])
    items[:] = [item for item in items if _name(item.nodeid) not in ended]


def pytest_runtest_logstart(nodeid: str) -> None:
    append(_path(), {"began": _name(nodeid)})


_parts: dict[str, list[pytest.TestReport]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    parts = _parts.setdefault(report.nodeid, [])
    parts.append(report)
    if report.when != "teardown":
        return
    skipped = next((part for part in parts if part.skipped), None)
    reason = "" if skipped is None else str(skipped.longrepr[-1]).removeprefix("Skipped: ")  # type: ignore[index]
    outcome = "failed" if any(part.failed for part in parts) else "skipped" if skipped else "passed"
    if reason != TIME_IS_OVER:
        seconds = round(sum(part.duration for part in parts), 2)
        append(_path(), {"ended": _name(report.nodeid), "outcome": outcome, "reason": reason, "seconds": seconds})


def _path() -> Path:
    return Path(os.environ[VARIABLE])


def _name(nodeid: str) -> str:
    return nodeid.partition("::")[2]


def append(path: Path, line: dict[str, Any]) -> None:
    """Adds a line to a file of outcomes."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


class Outcomes:
    """What a file has.

    Args:
        path: of the file, which need not be there.

    Attributes:
        tests: names of all tests; None if they are not known.
        ended: by name, the lines of tests that have ended.
        running: the test that began last, if it has not ended.
    """

    def __init__(self, path: Path) -> None:
        self.tests: list[str] | None = None
        self.ended: dict[str, dict[str, Any]] = {}
        self.running: str | None = None
        for line in map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.exists() else ()):
            if "tests" in line:
                self.tests, self.running = line["tests"], None
            elif "began" in line:
                self.running = line["began"]
            else:
                self.ended[line["ended"]], self.running = line, None

    @property
    def not_reached(self) -> list[str]:
        """Tests that have not ended; one that stands for all, if they are not known."""
        return ["all tests"] if self.tests is None else [name for name in self.tests if name not in self.ended]

    def report(self) -> dict[str, Any]:
        """How many passed, and which failed or were not reached."""
        by = {outcome: [each for each in self.ended.values() if each["outcome"] == outcome] for outcome in OUTCOMES}
        slow = sorted(self.ended.values(), key=lambda each: -float(each["seconds"]))[:_SLOW]
        return {
            "passed": len(by["passed"]),
            "skipped": dict(Counter(each["reason"] for each in by["skipped"])),
            "failed": _names(by["failed"]),
            "not_reached": self.not_reached,
            "slowest_s": {each["ended"]: each["seconds"] for each in slow},
        }


OUTCOMES = ("passed", "skipped", "failed")
_SLOW = 5
"""Tests whose seconds a report has."""


def _names(lines: Iterable[dict[str, Any]]) -> list[str]:
    return [line["ended"] for line in lines]
