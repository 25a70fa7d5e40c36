"""How much of what plans err by on real GPUs can be learned from their measured times; needs no GPU.

    python -m benchmarks.learned_costs --output benchmarks/results/learned_costs.json

Reads what each of two ranks was given by the plans of a kept run of benchmarks.throughput, and the attention seconds
that it took, and learns from them batch by batch, as training does, which plans a step while the one before it runs:
once speeds alone, once what reach costs as well. An error is by how much log(measured / planned) of the two ranks
differs; of a run, root mean square, weighted by planned work.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from distca.commands.versions import versions
from distca.plan.cost_correction import WHOLE_STEP, Learned, ServerWork
from distca.train.run.cost_correction import Learner

RUN = Path(__file__).parent / "results" / "throughput_2_gpus_30_batches_pretrain_128k_cp.json"
RANKS, FIRST = 2, 8
"""Ranks of the run; batches after which the learner counts as settled."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    output = parser.parse_args().output
    work, measured = _run(json.loads(RUN.read_text(encoding="utf-8")))
    report: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.learned_costs", *sys.argv[1:]]),
        "versions": versions(),
        "run": f"benchmarks/results/{RUN.name}",
        "nothing learned": _errors(work, measured, [Learned.nothing(RANKS)] * len(work))
        | {"by_batch": _far_reaching(work, measured).tolist()},
    }
    for name, reaching in (("speeds", False), ("speeds and reach", True)):
        before, last = _learn(work, measured, reaching)
        report[name] = _errors(work, measured, before) | {
            "reach_cost": [each.reach_cost for each in before],
            "speeds": last.speeds.tolist(),
        }
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    later = f"after the first {FIRST} batches"
    table = Table("learned", "error", later, title="measured against planned, two ranks apart")
    for name in ("nothing learned", "speeds", "speeds and reach"):
        figures = report[name]
        table.add_row(name, *(f"{100 * value:.2f} %" for key, value in figures.items() if key.startswith("error")))
    Console().print(table)


def _run(report: dict[str, Any]) -> tuple[list[ServerWork], np.ndarray]:
    """By batch what each rank was given, and the [batches, ranks] seconds that it took for one layer."""
    (cell,) = report["cells"].values()
    ranks = {key: np.array(values) for key, values in cell["modes"]["distca"]["attention_by_rank"].items()}
    given = zip(ranks["work_s_per_layer"].T, ranks["reaching_s_per_layer"].T, strict=True)
    return [ServerWork(*each) for each in given], ranks["measured_s"].T / report["model"]["layers"]


def _learn(work: list[ServerWork], measured: np.ndarray, reaching: bool) -> tuple[list[Learned], Learned]:
    """What each batch is planned with, and what is known after the last."""
    learner, nothing = Learner(RANKS, True), Learned.nothing(RANKS)
    known = [nothing, nothing]
    for given, took in zip(work, measured, strict=True):
        one = ServerWork.of_phases([ServerWork(given.seconds, given.reaching * reaching)])
        learner.learn([WHOLE_STEP], one, took[None])
        known.append(learner.current.get(WHOLE_STEP, nothing))
    return known[: len(work)], known[-1]


def _errors(work: list[ServerWork], measured: np.ndarray, learned: list[Learned]) -> dict[str, Any]:
    apart = _apart(work, measured, learned)
    return {"error": _error(apart, work, 0), f"error_after_{FIRST}": _error(apart, work, FIRST)}


def _apart(work: list[ServerWork], measured: np.ndarray, learned: list[Learned]) -> np.ndarray:
    """[batches] difference of the ranks' log(measured / planned)."""
    planned = [
        ((1 - each.reach_cost * each.typical_reach) * given.seconds + each.reach_cost * given.reaching) / each.speeds
        for given, each in zip(work, learned, strict=True)
    ]
    error = np.log(measured / np.stack(planned))
    return np.asarray(error[:, 1] - error[:, 0])


def _far_reaching(work: list[ServerWork], measured: np.ndarray) -> np.ndarray:
    """[batches] measured over planned seconds of the rank whose tasks reach farther, over those of the other."""
    apart = _apart(work, measured, [Learned.nothing(RANKS)] * len(work))
    reach = np.stack([given.reaching / given.seconds for given in work])
    return np.asarray(np.exp(np.where(reach[:, 1] > reach[:, 0], apart, -apart)))


def _error(apart: np.ndarray, work: list[ServerWork], first: int) -> float:
    weights = np.array([given.seconds.sum() for given in work])
    return float(np.sqrt(np.average(apart[first:] ** 2, weights=weights[first:])))


if __name__ == "__main__":
    main()
