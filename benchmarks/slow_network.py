"""Two nodes with a slow network between them, on this machine's CPUs: steps of DistCA and of other modes.

    python -m benchmarks.slow_network --megabits 50 200 0 --output FOLDER --modes packed cp2-keep distca -- \\
        --data.tokens_per_rank 8192 ...

Every node is a rank with a network, a host name and one core of its own (``distca.testing.nodes``, which takes root);
its link lets so many Mbit/s pass each way, 0 any. All modes train on the same batches by ``benchmarks.throughput`` over
the same links, gradients too. What the arguments are is said there. FOLDER gets slow_network.json, and a folder for
each bandwidth with all that ``benchmarks.throughput`` writes.

Beside it is what the simulator predicts. It is told the cost table that plans have, and how long attention and all else
of the first mode took at the first bandwidth. It is also told what each bandwidth gave an all-to-all (DistCA) and an
all-gather (others): gloo often sends one way at a time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measured_runs import batches_of, model_of
from benchmarks.throughput.settings import parse
from benchmarks.throughput.unused import CONTEXT, STAGES, refuse_unused
from distca.baselines import parse_mode
from distca.errors import DistcaError, LaunchError
from distca.log import die
from distca.plan.cost.table_file import find_table
from distca.simulate import Cluster, Job, Rates, Workload, simulate
from distca.simulate.prediction import Prediction
from distca.testing.nodes import Nodes, why_not
from distca.versions import command_line, header, write_report

ROOT = Path(__file__).parents[1]
PORT = "29541"
NODES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabits", type=int, nargs="+", default=[0], help="of each node's link, each way; 0: any")
    parser.add_argument("--output", type=Path, required=True, help="folder for slow_network.json and the runs")
    arguments, others = parser.parse_known_args()
    try:
        _run(arguments, others)
    except DistcaError as error:
        die(str(error), error.next_step)


def _run(arguments: argparse.Namespace, others: list[str]) -> None:
    _check(arguments.megabits, others)
    report: dict[str, Any] = {**header(command_line("python -m benchmarks.slow_network"), NODES), "links": {}}
    for megabits in track(arguments.megabits, description="Bandwidths"):
        folder = arguments.output.resolve() / f"{megabits}"
        report["links"][f"{megabits}"] = run(megabits, folder, others)
        write_report(arguments.output / "slow_network.json", report)
    first = arguments.megabits[0]
    contents = {megabits: _report(arguments.output / f"{megabits}") for megabits in arguments.megabits}
    for cell, modes in report["links"][f"{first}"].items():
        cores = Cores(contents[first], contents[first]["cells"][cell])
        for megabits, mode in product(arguments.megabits, modes):
            found = report["links"][f"{megabits}"][cell][mode]
            found["link_megabits"] = 8e3 * rate_of(contents[megabits], mode)
            found["tokens_per_s_predicted"] = cores.tokens_per_s(mode, rate_of(contents[megabits], mode))
    write_report(arguments.output / "slow_network.json", report)
    show(report["links"])


def _check(megabits: list[int], others: list[str]) -> None:
    """Refuse what cannot be, before anything starts.

    Raises:
        DistcaError: in a sentence.
    """
    if min(megabits) < 0:
        raise LaunchError(
            f"--megabits has {min(megabits)}.", "give bandwidths above 0, or 0 for links without a limit."
        )
    missing = why_not()
    if missing is not None:
        raise LaunchError(
            f"There can be no nodes on this machine: {missing}.", "run it as root on Linux, with iproute2."
        )
    if len(os.sched_getaffinity(0)) < NODES:
        raise LaunchError(f"There is one core for {NODES} nodes.", "run it on a machine with more.")
    refuse_unused(others[others.index("--") :] if "--" in others else [], used=(STAGES, CONTEXT))
    model = parse(["--output", "checked", *others], NODES, on_cpus=True).config.model
    if find_table("cpu", "reference", model.heads, model.kv_heads, model.resolved_head_dim) is None:
        raise LaunchError(
            f"There is no cost table of CPUs for {model.heads} query heads and {model.kv_heads} key/value heads of "
            f"size {model.resolved_head_dim}, so nothing could be predicted.",
            "take two query heads per key/value head, of size 32.",
        )


def run(megabits: int, folder: Path, others: list[str]) -> dict[str, Any]:
    """Modes over links of ``megabits``, by workload.

    Raises:
        LaunchError: a rank failed; its words are in ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "benchmarks.throughput", "--output", str(folder), *others]
    with Nodes(NODES, megabits or None) as nodes:
        where = {"WORLD_SIZE": f"{NODES}", "MASTER_ADDR": nodes.address(0), "MASTER_PORT": PORT}
        where |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        ranks = []
        for rank, core in enumerate(sorted(os.sched_getaffinity(0))[:NODES]):
            with (folder / f"rank{rank}.log").open("w") as log:
                ranks.append(
                    nodes.start(
                        rank,
                        words,
                        where | {"RANK": f"{rank}"},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        cwd=ROOT,
                        preexec_fn=partial(os.sched_setaffinity, 0, {core}),
                    )
                )
        codes = [each.wait() for each in ranks]
    if any(codes):
        raise LaunchError(f"Ranks ended with exit codes {codes}.", f"read {folder / 'rank0.log'}.")
    cells = _report(folder)["cells"]
    return {
        cell: {mode: figures(megabits, found) for mode, found in content["modes"].items()}
        for cell, content in cells.items()
    }


def rate_of(content: dict[str, Any], mode: str) -> float:
    """GB/s that a report's links gave what a mode sends."""
    return float(content["links"]["all_to_all_gb_per_s" if parse_mode(mode).disaggregated else "all_gather_gb_per_s"])


def figures(megabits: int, found: dict[str, Any]) -> dict[str, Any]:
    """Figures of a mode's part in a report of ``benchmarks.throughput``, with the seconds that its rows would take
    alone."""
    kept = {name: found[name] for name in ("tokens_per_s", "steps_s", "bytes_per_step")}
    each = found["bytes_per_step"] / NODES  # a rank sends and receives as many, both ways at once
    return kept | {"rows_alone_s": 8 * each / (1e6 * megabits) if megabits else 0.0}


@dataclass(frozen=True)
class Cores:
    """These CPUs as the simulator has them, for the batches of one workload of a report.

    Attributes:
        content: a report of ``benchmarks.throughput``.
        cell: its part on the workload.
    """

    content: dict[str, Any]
    cell: dict[str, Any]

    @cached_property
    def batches(self) -> list[Workload]:
        """The figures that were measured."""
        drawn = batches_of(self.content, self.cell)
        return [Workload(each, drawn.bins) for each in drawn.global_batches[self.content["warm_up"] :]]

    def tokens_per_s(self, mode: str, gb_s: float) -> float:
        """Predicted, for links of ``gb_s``."""
        steps = self._steps(mode, gb_s, self._rates)
        return sum(each.tokens for each in self.batches) / sum(each.step_s for each in steps)

    @cached_property
    def _rates(self) -> Rates:
        """The rates with which the report's first mode takes as long as it did: its attention, and all else as if it
        were matrix products."""
        mode, measured = next(iter(self.cell["modes"].items()))
        gb_s = rate_of(self.content, mode)
        nothing = dict.fromkeys(("optimizer_s", "parameter_s", "step_s", "phase_s", "expert_layer_s"), 0)
        rates = Rates(1, 1, 0, 0, 0, copy_bytes_per_s=math.inf, **nothing)
        attention = sum(float(each.attention_s.sum()) for each in self._steps(mode, gb_s, rates))
        rates = replace(rates, attention_factor=float(np.sum(measured["attention_by_rank"]["measured_s"])) / attention)
        low, high = 0.0, 1e4
        for _ in range(50):
            factor = (low + high) / 2
            took = sum(each.step_s for each in self._steps(mode, gb_s, replace(rates, linear_factor=factor)))
            low, high = (factor, high) if took < sum(measured["steps_s"]) else (low, factor)
        return replace(rates, linear_factor=factor)

    def _steps(self, mode: str, gb_s: float, rates: Rates) -> list[Prediction]:
        content, model = self.content, model_of(self.content["model"])
        cost = find_table("cpu", "reference", model.heads, model.kv_heads, model.resolved_head_dim)
        assert cost is not None, "_check saw to it"
        # The simulator's values have 2 bytes, these 4: links are half as fast to them.
        cost.shape = model.attention_shape()
        job = Job(
            model,
            Cluster(NODES, 1, network_gb_s=gb_s / 2),
            cost,
            tokens_per_rank=content["tokens_per_rank"],
            micro_batches=content["micro_batches"],
            recompute=content["recompute"],
            deal=content["deal"],
            nccl=True,
            rates=rates,
        )
        return [simulate(job, parse_mode(mode), each) for each in self.batches]


def _report(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "benchmark.json").read_text())
    return content


def show(links: dict[str, Any]) -> None:
    """A table on the screen."""
    table = Table(title="Two nodes with a slow network")
    for column in ("Mbit/s", "workload", "mode", "tokens/s", "predicted", "MB moved", "alone s"):
        table.add_column(column, justify="left" if column in ("workload", "mode") else "right")
    for megabits, cells in links.items():
        for cell, modes in cells.items():
            for mode, found in modes.items():
                table.add_row(
                    megabits if megabits != "0" else "any",
                    cell,
                    mode,
                    f"{found['tokens_per_s']:,.0f}",
                    f"{found['tokens_per_s_predicted']:,.0f}",
                    f"{found['bytes_per_step'] / 1e6:.1f}",
                    f"{found['rows_alone_s']:.2f}",
                )
    Console().print(table)


if __name__ == "__main__":
    main()
