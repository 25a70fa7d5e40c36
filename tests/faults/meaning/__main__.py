"""Attempts changes of meaning and writes what became of them.

    python -m tests.faults.meaning --cases 2000 --seed 1 --output benchmarks/results/meaning_fuzz.json

Four tenths are configurations, three are chat templates and three conversations. A case fails where it is served with
other logits or ids than transformers', where another than the assistant is learned, or where it ends in a traceback.
Not judged is a configuration that transformers itself cannot run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

from distca.versions import command_line, versions, write_report
from tests.faults.meaning import attempt


def main() -> None:
    """Exit code 1 where a case fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    began = time.monotonic()
    found = attempt(asked.cases, asked.seed)
    counts: dict[str, Counter[str]] = {}
    for each in found:
        counts.setdefault(each.kind, Counter())[each.ended] += 1
    judged = ("torch", "transformers", "tokenizers", "jinja2")
    report: dict[str, Any] = {
        "command": command_line("python -m tests.faults.meaning"),
        "versions": versions() | {name: metadata.version(name) for name in judged},
        "cases": asked.cases,
        "kinds": {kind: dict(counted) for kind, counted in sorted(counts.items())},
        "not judged": sorted({each.said for each in found if each.ended == "not judged"}),
        "defects": [each.kept() for each in found if each.is_defect],
        "seconds": round(time.monotonic() - began, 1),
    }
    if asked.output:
        write_report(asked.output, report)
    sys.stdout.write(json.dumps({name: report[name] for name in ("kinds", "defects", "seconds")}, indent=1) + "\n")
    sys.exit(bool(report["defects"]))


if __name__ == "__main__":
    main()
