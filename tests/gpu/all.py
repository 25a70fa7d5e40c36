"""Runs all GPU tests.

    python -m tests.gpu.all --seconds 3600 --results FOLDER

First come the tests that are marked ``alone``, on each pair of GPUs one file after the other, in at most half of the
seconds. Then all other files run side by side over all GPUs, and their cases in worlds of ranks that they share
(``worlds.py``). FOLDER gets gpu_tests_VERSION.json, by the version of megatron-core, and a folder of that name with
logs, the seconds of each case and the tests' own figures.

Each test's outcome is kept at once. Where time was short, the same command goes on with the tests that have not come to
their end, if code, hardware and versions are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from distca.versions import command_line, header, write_report
from tests.gpu.outcomes import VARIABLE, Outcomes, append
from tests.gpu.starts import SPOOL
from tests.gpu.worlds import Worlds

ROOT = Path(__file__).parents[2]
JUDGED_S = 15
"""Seconds before the end in which no case runs any more, and tests judge those that are done."""
CODE = ("distca", "megatron_patches", "csrc", "configs", "examples", "benchmarks", "tests")
BESIDE, ALONE = "not alone", "alone"  # the parts of a file, in pytest's words
ENDED = (0, 1, 5)  # exit codes of pytest that came to its end; 5 where all tests are of the other part


class Runs:
    """Runs of test files, each in a process of its own.

    Args:
        results: the folder for all results.
        seconds: after which what still runs is ended.
        gpus: names of the GPUs, as in CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, results: Path, seconds: float, gpus: Sequence[str]) -> None:
        self.began, self.until = time.monotonic(), time.monotonic() + seconds
        self._gpus, self._lock = list(gpus), threading.Lock()
        self._worlds: Worlds | None = None
        self._spool = tempfile.TemporaryDirectory(prefix="distca-spool-")
        git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
        self._report = header(command_line("python -m tests.gpu.all"), len(gpus))
        self._report |= {"commit": git.stdout.strip() or "unknown", "code": _digest(), "files": {}, "worlds": []}
        self._path = results / f"gpu_tests_{self._report['versions']['megatron-core']}.json"
        self._folder = self._path.with_suffix("")
        if self._path.exists():
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            if any(kept.get(key) != self._report[key] for key in ("code", "hardware", "versions")):
                shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        write_report(self._path, self._report)

    def run(self, files: Sequence[Path]) -> list[str]:
        """Runs the files; returns a sentence for every part of a file that failed or did not come to its end."""
        pairs: SimpleQueue[list[str]] = SimpleQueue()
        for first in range(0, max(1, len(self._gpus)), 2):
            pairs.put(self._gpus[first : first + 2])
        half = (self.began + self.until) / 2

        def alone(file: Path) -> None:
            pair = pairs.get()
            try:
                self._run(file, ALONE, pair, half)
            finally:
                pairs.put(pair)

        with ThreadPoolExecutor(pairs.qsize()) as pool:
            list(pool.map(alone, [file for file in files if "mark.alone" in file.read_text(encoding="utf-8")]))
        record = self._folder / "cases.jsonl"
        self._worlds = Worlds(Path(self._spool.name), len(self._gpus), self.until - JUDGED_S, record)
        with self._worlds as worlds, ThreadPoolExecutor(len(files)) as pool:
            list(pool.map(lambda each: self._run(each[1], BESIDE, self._from(each[0]), self.until), enumerate(files)))
        self._report["worlds"] = worlds.failures
        write_report(self._path, self._report)
        kept = sorted(self._report["files"].items())
        parts = [(f"{name}, {part}", _wrong(found)) for name, both in kept for part, found in both.items()]
        return [*(f"{part}: {'; '.join(said)}" for part, said in parts if said), *worlds.failures]

    def stop(self) -> None:
        """Ends all that runs, as if time were over."""
        self.until = 0.0
        if self._worlds:
            self._worlds.stop()

    def _from(self, first: int) -> list[str]:
        """All GPUs, from another one for each file."""
        first %= max(1, len(self._gpus))
        return self._gpus[first:] + self._gpus[:first]

    def _run(self, file: Path, part: str, gpus: Sequence[str], until: float) -> None:
        """Runs a part of a file until all its tests have ended, in further processes where one has died."""
        path = self._folder / f"{file.stem}, {part}.jsonl"
        code, began = self._code_before(path), time.monotonic()
        with path.with_suffix(".log").open("a", encoding="utf-8") as output:
            while (code is None or Outcomes(path).not_reached) and time.monotonic() < until:
                code = self._code(file, part, path, output, gpus, until)
                running = Outcomes(path).running
                if code in ENDED or running is None or time.monotonic() > until:
                    break
                died = {"outcome": "failed", "reason": f"ended with exit code {code}", "seconds": 0}
                append(path, {"ended": running} | died)
        found = Outcomes(path).report() | {"code": code, "seconds": round(time.monotonic() - began, 1)}
        with self._lock:
            self._report["files"].setdefault(file.stem, {})[part] = found
            write_report(self._path, self._report)
        sys.stdout.write(f"{file.stem}, {part}: {found['passed']} passed, {found['seconds']} s\n")
        sys.stdout.flush()

    def _code_before(self, path: Path) -> int | None:
        """The exit code of an earlier run that came to its end."""
        kept = Outcomes(path)
        return None if kept.not_reached else int(any(line["outcome"] == "failed" for line in kept.ended.values()))

    def _code(self, file: Path, part: str, path: Path, output: Any, gpus: Sequence[str], until: float) -> int:
        """The exit code of pytest, which is ended when time is over."""
        own = {"DISTCA_RESULTS": str(self._folder), VARIABLE: str(path), SPOOL: self._spool.name}
        own |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "tests.gpu.outcomes"]
        command += ["-v", "--color=no", "--durations=0", "--durations-min=1", "-m", part, str(file)]
        streams = {"stdout": output, "stderr": output, "start_new_session": True}
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | own, **streams)
        while process.poll() is None and time.monotonic() < min(until, self.until):
            time.sleep(0.2)
        if process.poll() is None:
            process.send_signal(signal.SIGUSR1)  # it says where it is
            time.sleep(0.5)
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


def _wrong(found: dict[str, Any]) -> list[str]:
    """The tests of a part that failed, and why it has not come to its end."""
    if found["code"] in ENDED and not found["not_reached"]:
        return list(found["failed"])
    return [*found["failed"], f"not reached: {', '.join(found['not_reached']) or 'none'}, exit code {found['code']}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, required=True, help="after which what still runs is ended")
    parser.add_argument("--results", type=Path, required=True, help="the folder for results")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    runs = Runs(given.results.absolute(), given.seconds, gpus)
    for number in (signal.SIGINT, signal.SIGTERM):  # tests have sessions of their own, and would go on
        signal.signal(number, lambda *_: runs.stop())
    wrong = runs.run(sorted((ROOT / "tests/gpu").glob("test_*.py")))
    sys.stdout.write("\n".join(["", *wrong, f"{len(wrong)} parts of files failed or were not reached.\n"]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
