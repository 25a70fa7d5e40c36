"""Attention in kept training steps beside what two cost tables say of the same tasks; nothing runs on GPUs.

    python -m benchmarks.attention_in_steps --output benchmarks/results/attention_in_steps.json

Each kept batch is dealt to ranks, or planned, as it was when it ran. A figure is measured seconds of attention over the
seconds that a table has for a rank's tasks: 1.1 says that attention took a tenth longer. Traced steps tell forward and
backward apart, by the names of kernels. ``python -m benchmarks.tables`` writes the figures into
``benchmarks/results/profiles.md``. Array legend: P ranks, N tasks of all ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.calibration_runs import RESULTS, Run, runs_of
from benchmarks.tables import MIXES, Figures, kept, rows
from distca.plan import CostModel
from distca.plan.cost.table_file import open_table
from distca.simulate import Workload
from distca.simulate.baseline_attention import pieces_of_micro_batch
from distca.simulate.cad import planned
from distca.versions import command_line, versions, write_report

FILES = {
    "throughput_2_gpus_peers_128k": "128K",
    "baselines_2_gpus_64k": "64K",
    "throughput_2_gpus_peers_64k": "64K, traced",
    "baselines_2_gpus_64k_fp8": "64K, FP8",
    "baselines_4_gpus_128k": "128K, four GPUs",
    "baselines_4_gpus_128k_traced": "128K, four GPUs, traced",
}
"""The newest runs of the 8B shape on H200s, and what a page calls them: tokens for each GPU."""
AGAIN = "profile_h200_again"
_WAYS = ("forward", "backward")
_LONG = 65_536
"""Keys of a rank's longest task, from which on its documents are not short."""
_SUMS_S = 0.5
"""Seconds of kernels that sum gradients in a traced step, from which on they wait for another GPU: alone they take less
than 0.1 s."""


@dataclass(frozen=True)
class Tasks:
    """The tasks of one layer's attention in a step and one direction.

    Attributes:
        rank: [N] the rank that computes each task.
        queries: [N] rows of queries.
        keys: [N] rows of keys that the last query sees.
    """

    rank: np.ndarray
    queries: np.ndarray
    keys: np.ndarray


def tasks_of(run: Run, batch: Workload) -> dict[str, Tasks]:
    """The tasks of a batch by direction."""
    if not run.mode.disaggregated:
        each = [pieces_of_micro_batch(run.job, run.mode, micro, batch.bins)[1] for micro in batch.micro_batches]
        both = Tasks(*_joined((one.rank, one.rows, one.stop) for one in each))
        return dict.fromkeys(_WAYS, both)
    phases = planned(run.job, batch).phases
    plans = {way: [plan for direction, phase in phases if direction == way for plan in phase.plans] for way in _WAYS}
    return {
        way: Tasks(*_joined((one.tasks.server, one.tasks.stop - one.tasks.start, one.tasks.stop) for one in found))
        for way, found in plans.items()
    }


def _joined(columns: Iterable[tuple[np.ndarray, ...]]) -> Iterator[np.ndarray]:
    return map(np.concatenate, zip(*columns, strict=True))


def seconds_of(run: Run, tasks: Tasks, way: str, table: CostModel) -> np.ndarray:
    """[P] a table's seconds of all layers' attention in one direction."""
    each = getattr(table, way)(tasks.queries, tasks.keys)
    return run.job.model.layers * np.bincount(tasks.rank, each, run.job.servers)


def compared(file: str) -> tuple[list[Figures], list[Figures]]:
    """Figures of a file's steps by workload and mode, each [P][steps], and those of its traced steps by rank."""
    report = kept(file)
    steps, traced = [], []
    for run in runs_of(f"{file}.json", report):
        figures = report["cells"][run.workload]["modes"][run.mode.name]
        name = {"file": file, "workload": run.workload, "mode": run.mode.name}
        by_batch = [tasks_of(run, batch) for batch in run.batches]
        measured = np.array(figures["attention_by_rank"]["measured_s"])
        each: Figures = {"longest_keys": np.stack([longest_keys(run, tasks) for tasks in by_batch], axis=1).tolist()}
        for table, cost in tables_of(run).items():
            said = [sum(seconds_of(run, tasks[way], way, cost) for way in _WAYS) for tasks in by_batch]
            each[table] = (measured / np.stack(said, axis=1)).tolist()
        steps.append(name | each)
        if figures.get("traced") and all(figures["traced"]):
            traced += [name | one for one in _traced(run, by_batch[0], figures["traced"])]
    return steps, traced


def longest_keys(run: Run, tasks: dict[str, Tasks]) -> np.ndarray:
    """[P] keys of each rank's longest task in forward."""
    longest = np.zeros(run.job.servers, np.int64)
    np.maximum.at(longest, tasks["forward"].rank, tasks["forward"].keys)
    return longest


def tables_of(run: Run) -> dict[str, CostModel]:
    """The table that planned a run, and the one measured again."""
    shape = run.job.shape
    again = open_table(RESULTS / f"{AGAIN}.json", shape.heads, shape.kv_heads, shape.head_dim)
    return {"shipped": run.job.cost, "again": again}


def _traced(run: Run, tasks: dict[str, Tasks], traces: list[Figures]) -> Iterator[Figures]:
    """Figures of one traced step by rank. ``sums_s`` are seconds of the kernels that sum gradients."""
    longest = longest_keys(run, tasks)
    said = {
        table: {way: seconds_of(run, tasks[way], way, cost) for way in _WAYS} for table, cost in tables_of(run).items()
    }
    for rank, trace in enumerate(traces):
        kernels = trace["largest"]
        forward = _named(kernels["attention"], lambda name: "Forward" in name)
        took = {"forward": forward, "backward": sum(kernels["attention"].values()) - forward}
        yield {
            "rank": rank,
            "longest_keys": int(longest[rank]),
            "sums_s": _named(kernels["communication"], lambda name: "ReduceScatter" in name),
            **{way: {table: took[way] / float(said[table][way][rank]) for table in said} for way in _WAYS},
        }


def _named(kernels: dict[str, float], wanted: Callable[[str], bool]) -> float:
    """Seconds of the kernels with such names."""
    return sum(seconds for name, seconds in kernels.items() if wanted(name))


def table() -> str:
    """The means, and the least and most, of every run, in Markdown."""
    ways = {"distca": "DistCA", "cp2-keep": "context parallelism"}
    head = ["tokens for each GPU, mix", *(f"{way}, {which}" for way in ways.values() for which in ("shipped", "again"))]
    lines = [head, ["---"] * len(head)]
    steps = {(each["file"], each["workload"], each["mode"]): each for each in kept("attention_in_steps")["steps"]}
    for file, workload in dict.fromkeys(case[:2] for case in steps):
        line = [f"[{FILES[file]}]({file}.json), {MIXES[workload.split()[0]]}"]
        for mode in ways:
            found = steps.get((file, workload, mode))
            line += [_spread(found[which]) if found else "–" for which in ("shipped", "again")]
        lines.append(line)
    return rows(*lines)


def _spread(over: list[list[float]]) -> str:
    return f"{np.mean(over):.2f} ({np.min(over):.2f}–{np.max(over):.2f})"


def by_length() -> str:
    """The means, and the least and most, of all ranks and steps with a long document, and of all others."""
    found = kept("attention_in_steps")["steps"]
    over, keys = (np.concatenate([np.ravel(each[name]) for each in found]) for name in ("again", "longest_keys"))
    parts = [over[keys >= _LONG], over[keys < _LONG]]
    means = [f"{part.mean():.2f}" for part in parts]
    spreads = [f"({part.min():.2f} to {part.max():.2f})" for part in parts]
    return (
        f"{means[0]} times as long in the mean {spreads[0]} on GPUs with a document of 64K tokens or more, and "
        f"{means[1]} times {spreads[1]} on others"
    )


def traced() -> str:
    """Forward and backward of traced steps, for long and short documents and where sums of gradients wait."""
    found = kept("attention_in_steps")["traced"]
    short = [each for each in found if each["longest_keys"] < _LONG]
    waiting = [each for each in short if each["sums_s"] > _SUMS_S]
    return (
        f"forward takes {_range(found, 'forward')} times as long as that profile says. Backward takes "
        f"{_range([each for each in found if each not in short], 'backward')} times as long on GPUs with a document of "
        f"64K tokens or more, {_range([each for each in short if each not in waiting], 'backward')} times on others, "
        f"and {_range(waiting, 'backward')} times where NCCL's sums of gradients wait"
    )


def _range(found: list[Figures], way: str) -> str:
    values = [each[way]["again"] for each in found]
    return f"{min(values):.2f} to {max(values):.2f}"


def report() -> dict[str, Any]:
    found = [compared(file) for file in FILES]
    return {
        "command": command_line("python -m benchmarks.attention_in_steps"),
        "versions": versions(),
        "table_measured_again": f"{AGAIN}.json",
        "steps": [each for steps, _ in found for each in steps],
        "traced": [each for _, traces in found for each in traces],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    write_report(parser.parse_args().output, report())


if __name__ == "__main__":
    main()
