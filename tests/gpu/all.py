"""Runs all GPU tests.

    python -m tests.gpu.all --seconds 3600 --results FOLDER

Files run side by side over all GPUs, those that take longest first. Then the tests that are marked ``alone`` run, one
file after the other. FOLDER gets gpu_tests_VERSION.json, by the version of megatron-core, and a folder of that name
with logs and the tests' own figures. The JSON is written after each file. Where time was short, the same command goes
on: files that have come to their end are left out, if code, hardware and versions are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from distca.versions import command_line, header, write_report

ROOT = Path(__file__).parents[2]
FILES_PER_GPU = 4  # that run side by side: most of their time they compile on the CPU
LONGEST = [
    "servers", "recurrent", "nvshmem", "transformer_engine", "parity", "checkpoint", "pipeline_schedule", "own_loop",
    "fp8_weights", "layer_kinds", "latent", "experts", "baselines", "moments", "offload",
]  # fmt: skip
CODE = ("distca", "megatron_patches", "csrc", "configs", "examples", "benchmarks", "tests")
BESIDE, ALONE = "not alone", "alone"  # the parts of a file, in pytest's words
ENDED = (0, 1, 5)  # exit codes of pytest that came to its end; 5 where all tests are of the other part
RESULT = re.compile(r"^(\S*::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
SELECTED = re.compile(r"collected (\d+) items?(?: / .*?(\d+) selected)?")
SKIPPED = re.compile(r"^SKIPPED \[(\d+)\] \S+ (.*)$", re.MULTILINE)


class Runs:
    """Runs of test files, each in a process of its own.

    Args:
        results: the folder for all results.
        seconds: after which what still runs is ended.
        gpus: names of the GPUs, as in CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, results: Path, seconds: float, gpus: Sequence[str]) -> None:
        self.until, self._gpus, self._lock = time.monotonic() + seconds, gpus, threading.Lock()
        git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
        self._report = header(command_line("python -m tests.gpu.all"), len(gpus))
        self._report |= {"commit": git.stdout.strip() or "unknown", "code": _digest(), "files": {}}
        self._path = results / f"gpu_tests_{self._report['versions']['megatron-core']}.json"
        if self._path.exists():
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            if all(kept.get(key) == self._report[key] for key in ("code", "hardware", "versions")):
                self._report = kept
        self._folder = self._path.with_suffix("")
        self._folder.mkdir(parents=True, exist_ok=True)

    def run(self, files: Sequence[Path]) -> list[str]:
        """Runs the files; returns a sentence for every part of a file that failed or did not come to its end."""
        left = [(number, file) for number, file in enumerate(files) if not self._has_ended(file, BESIDE)]
        with ThreadPoolExecutor(FILES_PER_GPU * max(1, len(self._gpus))) as pool:
            list(pool.map(lambda each: self._run(each[1], BESIDE, each[0]), left))
        for file in files:
            if "mark.alone" in file.read_text(encoding="utf-8") and not self._has_ended(file, ALONE):
                self._run(file, ALONE, 0)
        kept = sorted(self._report["files"].items())
        parts = [(f"{name}, {part}", _wrong(found)) for name, both in kept for part, found in both.items()]
        return [f"{part}: {'; '.join(said)}" for part, said in parts if said]

    def _has_ended(self, file: Path, part: str) -> bool:
        found = self._report["files"].get(file.stem, {}).get(part)
        return found is not None and _wrong(found) == found["failed"]

    def _run(self, file: Path, part: str, first: int) -> None:
        """Runs a part of a file, whose first GPU has this number."""
        log, began, code = self._folder / f"{file.stem}, {part}.log", time.monotonic(), None
        with log.open("w", encoding="utf-8") as output:
            if began < self.until:
                code = self._code(["-v", "--color=no", "-m", part, str(file)], output, first)
        found = _found(log.read_text(encoding="utf-8", errors="replace"))
        found |= {"code": code, "seconds": round(time.monotonic() - began, 1)}
        with self._lock:
            self._report["files"].setdefault(file.stem, {})[part] = found
            write_report(self._path, self._report)
        sys.stdout.write(f"{file.stem}, {part}: {found['passed']} passed, {found['seconds']} s\n")

    def _code(self, arguments: list[str], output: Any, first: int) -> int:
        """The exit code of pytest, which is ended when time is over."""
        gpus = [self._gpus[(first + number) % len(self._gpus)] for number in range(len(self._gpus))]
        own = {"DISTCA_RESULTS": str(self._folder)} | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
        command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), *arguments]
        streams = {"stdout": output, "stderr": output, "start_new_session": True}
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | own, **streams)
        while process.poll() is None and time.monotonic() < self.until:
            time.sleep(0.2)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(15)  # seconds in which it may end its ranks
        with suppress(ProcessLookupError):  # ranks that are left
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def _digest() -> str:
    """Of all code and settings, also of what no commit has."""
    kinds = {".py", ".sh", ".yaml", ".cu", ".cpp", ".h", ".cuh"}
    found = [file for folder in CODE for file in (ROOT / folder).rglob("*") if file.suffix in kinds]
    found += [*ROOT.glob("*.py"), *ROOT.glob("*.sh"), ROOT / "pyproject.toml"]
    digest = hashlib.sha256()
    for file in sorted(found):
        digest.update(f"{file.relative_to(ROOT)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _found(text: str) -> dict[str, Any]:
    """What the output of a part says of its tests."""
    ends, selected, skipped = RESULT.findall(text), SELECTED.search(text), Counter[str]()
    for number, reason in SKIPPED.findall(text):
        skipped[reason] += int(number)
    return {
        "passed": sum(end == "PASSED" for _, end in ends),
        "skipped": dict(skipped),
        "failed": [name.partition("::")[2] for name, end in ends if end in ("FAILED", "ERROR")],
        "not_reached": max(0, int(selected[2] or selected[1]) - len(ends)) if selected else "all",
    }


def _wrong(found: dict[str, Any]) -> list[str]:
    """The tests of a part that failed, and why it has not come to its end."""
    if found["code"] in ENDED and not found["not_reached"]:
        return list(found["failed"])
    return [*found["failed"], f"{found['not_reached']} not reached, exit code {found['code']}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, required=True, help="after which what still runs is ended")
    parser.add_argument("--results", type=Path, required=True, help="the folder for results")
    given = parser.parse_args()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    runs = Runs(given.results.absolute(), given.seconds, gpus)
    for number in (signal.SIGINT, signal.SIGTERM):  # tests have sessions of their own, and would go on
        signal.signal(number, lambda *_: setattr(runs, "until", 0.0))
    order = {f"test_{name}": number for number, name in enumerate(LONGEST)}
    files = sorted((ROOT / "tests/gpu").glob("test_*.py"), key=lambda file: order.get(file.stem, len(order)))
    wrong = runs.run(files)
    sys.stdout.write("\n".join(["", *wrong, f"{len(wrong)} parts of files failed or were not reached.\n"]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
