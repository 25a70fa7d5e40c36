"""Files that are damaged or made up, of every kind that is read: a sentence or a run, never anything else.

    python -m tests.faults.fuzz --cases 2000 --seed 1 --output benchmarks/results/fuzzing.json

A case is one change of one file. It fails where it ends with another exception than those that become sentences, runs
for more than half a minute, or runs a command; and a checkpoint whose checksums are there fails where it is resumed
from and the model or the optimizer is not as saved. pytest does not collect this.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from rich.progress import track

from distca.errors import DistcaError
from distca.versions import command_line, versions, write_report
from tests.faults import mutations
from tests.train.small_runs import ROOT

_TOO_LONG_S = 30
_COMMANDS = {"os.system", "os.exec", "os.posix_spawn", "os.fork", "os.startfile", "subprocess.Popen", "pty.spawn"}


class CommandRunError(Exception):
    """A file ran a command."""


class TookTooLongError(Exception):
    """Reading a file did not end."""


class DifferentError(Exception):
    """A damaged checkpoint was resumed from as if it were whole."""


def _stop(_: int, __: FrameType | None) -> None:
    raise TookTooLongError


def outcome(read: Callable[[], str]) -> tuple[str, str]:
    """What became of a case: ("run" or "sentence", what was said), or ("failed", the trace)."""
    ran: list[str] = []
    _watching.append(ran)
    signal.alarm(_TOO_LONG_S)
    try:
        found = "run", read()
    except DistcaError as error:
        found = "sentence", str(error)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        said = "".join(traceback.format_exception(error, limit=-6))
        found = "failed", said.replace(f"{ROOT}/", "").replace(f"{sys.base_prefix}/", "")
    finally:
        signal.alarm(0)
        _watching.clear()
    return ("failed", f"it ran {ran[0]}") if ran else found


_watching: list[list[str]] = []


def _audit(event: str, _: tuple[Any, ...]) -> None:
    if event in _COMMANDS and _watching:
        _watching[0].append(event)


def main() -> None:
    """Try as many cases as asked; the JSON is written after every hundredth and at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to see one again")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", help="kinds of files")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _stop)
    began, counts, failures = time.monotonic(), dict[str, collections.Counter[str]](), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="distca-fuzz-") as name:
        from tests.faults.subjects import subjects

        kinds = [each for each in subjects(Path(name)) if not asked.only or each.name in asked.only]
        sys.addaudithook(_audit)
        shares = [each for each in kinds for _ in range(each.share)]
        for number in track(range(asked.first, asked.first + asked.cases), "files"):
            randomly = random.Random(f"{asked.seed} {number}")
            kind = shares[number % len(shares)]
            with tempfile.TemporaryDirectory(dir=name) as scratch:
                changed = kind.change(Path(scratch), randomly)
                ended, said = outcome(lambda: kind.read(Path(scratch)))  # noqa: B023
            counts.setdefault(kind.name, collections.Counter())[ended] += 1
            if ended == "failed":
                failures.append({"case": number, "kind": kind.name, "change": changed, "said": said})
            if asked.output and (number % 100 == 99 or number == asked.first + asked.cases - 1):
                report = {
                    "command": command_line("python -m tests.faults.fuzz"),
                    "versions": versions(),
                    "cases": number + 1 - asked.first,
                    "kinds": {kind: dict(counted) for kind, counted in sorted(counts.items())},
                    "failures": failures,
                    "changes": mutations.NAMES,
                    "seconds": round(time.monotonic() - began, 1),
                }
                write_report(asked.output, report)
    for failure in failures[:20]:
        sys.stderr.write(f"case {failure['case']}, {failure['kind']}, {failure['change']}:\n{failure['said']}\n")
    sys.stdout.write(f"{json.dumps({kind: dict(counted) for kind, counted in counts.items()})}\n")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
