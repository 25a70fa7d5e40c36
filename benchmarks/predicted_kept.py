"""Kept runs predicted from their command lines alone, as before a run, beside what they measured.

    python -m benchmarks.predicted_kept --output benchmarks/results/predicted_kept.json

Links are those that a run measured. An H100's cost tables stand in for those that an H200 lacks. Code has changed since
some of these runs, whose GPUs did more than is predicted today; ``benchmarks.calibration`` counts what they did.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import shlex
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.calibration_runs import RESULTS
from benchmarks.predict import Machine, joined, predicted
from benchmarks.run_costs import GPUS
from distca.errors import DistcaError
from distca.versions import command_line, versions, write_report

_THROUGHPUT = ("throughput_*", "baselines_*_gpus*", "kinds_*_gpus*", "kinds_*_two_nodes*", "dense_*_two_nodes")
_FILES = (*_THROUGHPUT, "experts_*_gpus", "experts_*_two_nodes", "hybrid_*_cut_*", "pipeline_8b_8_layers_*")
_BENCHMARK = re.compile(r"benchmarks[./](\w+)")


def asked_of(content: dict[str, Any]) -> tuple[str, list[str]]:
    """The benchmark of a kept report's command line, throughput or pipeline, and its arguments. One of two nodes is a
    throughput run over sockets, of so many batches as ``--runs`` names."""
    words = shlex.split(content["command"])
    number, name = next((n, found[1]) for n, word in enumerate(words) if (found := _BENCHMARK.search(word)))
    asked = words[number + 1 :]
    if name != "two_nodes":
        return name, asked
    split, first = asked.index("--"), next(n for n, word in enumerate(asked[1:], 1) if word.startswith("--"))
    own = ["--socket-nodes", "--short-warm-up", "--batches", str(content["batches"])]
    own += [*asked[split:], "--train.micro_batches", str(content["micro_batches"])]
    return "throughput", [*asked[first:split], *own]


def beside(content: dict[str, Any]) -> dict[str, Any]:
    """The prediction of a kept report's command line beside its figures.

    Raises:
        DistcaError: the command line is refused today.
    """
    of, asked = asked_of(content)
    ranks, gpu = content["hardware"].split(" × ")
    links = content.get("links", {"all_to_all_gb_per_s": 300.0, "all_gather_gb_per_s": 300.0})
    rates = links["all_to_all_gb_per_s"], links["all_gather_gb_per_s"]
    table_of = next(each for each in GPUS if each != gpu)
    before = predicted(asked, Machine(int(ranks), gpu, rates, table_of), of)
    return joined(before | {"command": content["command"]}, content)


def reports() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every kept report by the name of its file. Of two nodes there may be several runs in a file."""
    for path in sorted({path for name in _FILES for path in RESULTS.glob(f"{name}.json")}):
        content = json.loads(path.read_text())
        for run, each in content.get("runs", {"": content}).items():
            yield " ".join(filter(None, (path.name, run))), each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    arguments = parser.parse_args()
    logging.getLogger("distca").setLevel(logging.ERROR)
    files: dict[str, Any] = {}
    for name, report in reports():
        try:
            files[name] = beside(report)
        except DistcaError as error:
            files[name] = {"refused": str(error), "cells": {}}
    errors = [abs(row["error"]) for each in files.values() for cell in each["cells"].values() for row in cell.values()]
    report = {
        "command": command_line("python -m benchmarks.predicted_kept"),
        "versions": versions(),
        "modes": len(errors),
        "within_5_percent": sum(error <= 0.05 for error in errors),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "files": files,
    }
    write_report(arguments.output, report)


if __name__ == "__main__":
    main()
