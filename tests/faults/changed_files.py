"""Files of models, tokenizers, tables and checkpoints that were changed, each read as a run or a command would.

    python -m tests.faults.changed_files --cases 1500 --seed 1 --output benchmarks/results/changed_files.json

A case must end in a sentence, or in values that the file holds. It fails where it ends with another exception, where
its process dies or takes longer than half a minute, where text comes from elsewhere in memory, or where a file is
deleted. Cases run in processes of their own, in which a broken offset ends no other case.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from distca.errors import DistcaError
from distca.versions import command_line, versions, write_report
from tests.faults import mutations
from tests.faults.changed_folders import SUBJECTS, Subject, prepare
from tests.train.small_runs import ROOT

_TOO_LONG_S = 30.0
_SPECIAL = ("a named pipe", "a folder", "a link to nothing", "a device without end")
_VALUES: tuple[Any, ...] = (None, True, -1, 0, 2**31, 2**70, 1.5, "", "..", "/etc/passwd", "a/b", "\0", [], {}, [[]])


def change(folder: Path, file: Path, randomly: random.Random) -> str:
    """Change one file of a folder; what was done."""
    drawn = randomly.random()
    if drawn < 0.08:
        special = randomly.choice(_SPECIAL)
        file.unlink()
        {
            "a named pipe": lambda: os.mkfifo(file),
            "a folder": file.mkdir,
            "a link to nothing": lambda: file.symlink_to(folder / "nothing"),
            "a device without end": lambda: file.symlink_to("/dev/zero"),
        }[special]()
        return special
    if drawn < 0.6 and file.suffix == ".json":
        content = json.loads(file.read_bytes())
        said = _other_value(content, randomly)
        file.write_text(json.dumps(content))
        return said
    kinds = mutations.TEXT if file.suffix in (".json", ".jinja", ".txt") else mutations.BINARY
    if file.name == ".metadata":
        kinds = mutations.PICKLE
    changed, name = mutations.change(file.read_bytes(), kinds, randomly)
    file.write_bytes(changed)
    return name


def _other_value(content: Any, randomly: random.Random) -> str:
    """Put another value somewhere into JSON."""
    while True:
        keys = list(content) if isinstance(content, dict) else list(range(len(content)))
        key = randomly.choice(keys)
        inner = content[key]
        if isinstance(inner, dict | list) and inner and randomly.random() < 0.8:
            content = inner
        elif isinstance(content, dict) and randomly.random() < 0.2:
            del content[key]
            return "an entry left out"
        else:
            content[key] = randomly.choice(_VALUES)
            return "another value"


def attempt(root: Path, scratch: Path, subject: Subject, number: int, seed: int) -> tuple[str, str, str]:
    """(what was changed, how it ended, what was said) of one case."""
    randomly = random.Random(f"{seed} {subject.name} {number}")
    source = randomly.choice(sorted((root / subject.name).iterdir()))
    folder, work = scratch / "given", scratch / "work"
    shutil.copytree(source, folder)
    work.mkdir()
    (work / "kept").touch()
    name = randomly.choice(subject.changed)
    said = f"{name}: {change(folder, folder / name, randomly)}"
    before = set(os.listdir(folder))
    os.chdir(work)
    try:
        ended, words = "read", str(subject.read(folder))
    except DistcaError as error:
        ended, words = "sentence", str(error)
        words.encode()
    except BaseException as error:
        ended, words = "failed", "".join(traceback.format_exception(error, limit=-6)).replace(f"{ROOT}/", "")
    if os.listdir(work) != ["kept"] or before - set(os.listdir(folder)):
        ended, words = "failed", "it deleted something"
    return said, ended, words


def _work(root: Path, seed: int, pipe: Connection) -> None:
    """Attempt the cases that come in until None does."""
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what libraries say of damage
    by_name = {each.name: each for each in SUBJECTS}
    while (case := pipe.recv()) is not None:
        with tempfile.TemporaryDirectory(dir=root) as scratch:
            pipe.send(attempt(root, Path(scratch), by_name[case[0]], case[1], seed))
            os.chdir(root)


class _Worker:
    """A process that attempts cases, and another one where it died."""

    def __init__(self, root: Path, seed: int) -> None:
        self._root, self._seed = root, seed
        self._process: BaseProcess | None = None

    def run(self, case: tuple[str, int]) -> tuple[str, str, str]:
        if self._process is None:
            context = multiprocessing.get_context("forkserver")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_work, args=(self._root, self._seed, theirs))
            self._process.start()
            theirs.close()
        self._pipe.send(case)
        try:
            if self._pipe.poll(_TOO_LONG_S):
                found: tuple[str, str, str] = self._pipe.recv()
                return found
            said = f"it took longer than {_TOO_LONG_S:.0f} s"
        except (EOFError, ConnectionError):
            self._process.join()
            said = f"its process ended with code {self._process.exitcode}"
        self._process.kill()
        self._process = None
        return "", "failed", said

    def stop(self) -> None:
        if self._process is not None:
            self._pipe.send(None)
            self._process.join()


def run_cases(cases: int, seed: int, names: Sequence[str], workers: int = 2) -> list[dict[str, Any]]:
    """Attempt cases of the subjects of these names, each as often as its share says; what became of each."""
    from concurrent.futures import ThreadPoolExecutor

    shares = [each.name for each in SUBJECTS for _ in range(each.share) if each.name in names]
    with tempfile.TemporaryDirectory(prefix="distca-changed-") as folder:
        root = Path(folder)
        prepare(root, names)
        pool = [_Worker(root, seed) for _ in range(workers)]

        def part(first: int) -> list[dict[str, Any]]:
            found = []
            for number in range(first, cases, workers):
                kind = shares[number % len(shares)]
                changed, ended, said = pool[first].run((kind, number))
                found.append({"case": number, "kind": kind, "change": changed, "ended": ended, "said": said})
            pool[first].stop()
            return found

        with ThreadPoolExecutor(workers) as threads:
            parts = list(threads.map(part, range(workers)))
    return sorted((each for part in parts for each in part), key=lambda each: each["case"])


def main() -> None:
    """Attempt as many cases as asked and write what became of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[each.name for each in SUBJECTS], help="kinds of folders")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    began = time.monotonic()
    found = run_cases(asked.cases, asked.seed, asked.only)
    counts: dict[str, collections.Counter[str]] = {}
    for each in found:
        counts.setdefault(each["kind"], collections.Counter())[each["ended"]] += 1
    failures = [each for each in found if each["ended"] == "failed"]
    report = {
        "command": command_line("python -m tests.faults.changed_files"),
        "versions": versions(),
        "cases": asked.cases,
        "kinds": {kind: dict(counted) for kind, counted in sorted(counts.items())},
        "failures": failures,
        "seconds": round(time.monotonic() - began, 1),
    }
    if asked.output:
        write_report(asked.output, report)
    for each in failures[:20]:
        sys.stderr.write(f"case {each['case']}, {each['kind']}, {each['change']}:\n{each['said']}\n")
    sys.stdout.write(f"{json.dumps(report['kinds'])}\n")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
