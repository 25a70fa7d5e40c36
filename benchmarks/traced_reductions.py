"""How fast gradients are summed beside backward, and weights are gathered behind it, in kept traces of dense models.

``python -m benchmarks.tables`` writes the figures into ``benchmarks/results/simulated.md``, and a test holds the
simulator's constant against them. A rate is over that of an all-gather that the same run measured alone. Of a step's
ranks the one with the shortest kernels counts: those of others contain waits for it.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.calibration_runs import RESULTS, Run, runs_of
from benchmarks.run_costs import GPUS
from benchmarks.tables import Figures, kept
from distca.simulate.job import VALUE, WIDE

_FILES = ("throughput_*", "baselines_*", "hybrid_*_cut_*")


@dataclass(frozen=True)
class Rates:
    """Rates of one traced mode over that of an all-gather.

    Attributes:
        summed: of gradients, in float32.
        gathered: of weights, in bfloat16; None with context parallelism, which gathers keys and values too.
    """

    summed: float
    gathered: float | None


def rates() -> list[Rates]:
    """The rates of every traced mode."""
    names = sorted(path.stem for pattern in _FILES for path in RESULTS.glob(f"{pattern}.json"))
    return [each for name in names if "cells" in (report := kept(name)) for each in _of_file(name, report)]


def _of_file(name: str, report: Figures) -> Iterator[Rates]:
    if not report.get("links") or report.get("fp8", "none") != "none":
        return
    batches = min(int(_traced_batches(report["command"])), report["batches"])
    other = next(gpu for gpu in GPUS if gpu not in report["hardware"])
    for run in runs_of(f"{name}.json", report, other):
        traces = report["cells"][run.workload]["modes"][run.mode.name].get("traced")
        if traces and all(traces) and (summed := _seconds(traces, "ReduceScatter")):
            alone = 1e9 * report["links"]["all_gather_gb_per_s"]
            sent = batches * _parameters_sent(run)
            gathers_more = not (run.mode.disaggregated or run.mode.method == "packed")
            gathered = None if gathers_more else VALUE * sent / _seconds(traces, "AllGather") / alone
            yield Rates(WIDE * sent / summed / alone, gathered)


def _traced_batches(command: str) -> str:
    found = re.search(r"--traced (\d+)", command)
    return found[1] if found else "2"


def _parameters_sent(run: Run) -> float:
    """Parameters of which each rank sends something in a reduction."""
    ranks = run.job.data_parallel
    return run.job.parameters * (ranks - 1) / ranks


def _seconds(traces: list[Figures], word: str) -> float:
    """The least of any rank's seconds in kernels with that word in their names; 0 where none is named."""
    kernels = [trace["largest"].get("communication", {}) for trace in traces]
    return min(sum(seconds for name, seconds in each.items() if word in name) for each in kernels)


def in_short() -> str:
    found = rates()
    summed, gathered = [each.summed for each in found], [each.gathered for each in found if each.gathered]
    return (
        f"{min(summed):.2f} to {max(summed):.2f} of it, {statistics.median(summed):.2f} in the median of "
        f"{len(summed)} traced modes of dense models and hybrids over NVLink. Weights are gathered with nothing beside "
        f"them, at {min(gathered):.2f} to {max(gathered):.2f} of it"
    )
