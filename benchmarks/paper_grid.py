"""The paper's grid and larger pools, simulated: DistCA against the best degree of context parallelism.

    python -m benchmarks.paper_grid --output benchmarks/results/paper_grid.json --picture docs/images/paper_grid.png
    python -m benchmarks.paper_grid --fp8 current --output benchmarks/results/paper_grid_fp8.json
    python -m benchmarks.paper_grid --pools --output benchmarks/results/simulated_pools.json

Models, contexts, batches and mixes are those of arXiv 2510.18121, section 6: tensor parallelism of 8, nodes of 8 GPUs,
50 GB/s per GPU between them. The paper's batches are given per context for a smaller, a middle and a larger number of
GPUs. Here they are paired with 64, 128 and 256 GPUs without stages (3D) and for 8B with 2 stages (4D). For 34B with 4
stages they are paired with 128, 256 and 512. Micro-batches are as many as leave 128K tokens, or the batch's share, to a
server. Each mode recomputes the least that fits into memory. With ``--fp8`` linear layers of all modes are in FP8, and
the kernel is flash-attn-4 only.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from rich.progress import track

from benchmarks.run_costs import costs_of
from benchmarks.throughput.batches import draw_batches
from benchmarks.throughput.settings import Cell
from distca.data.mixes import Mix
from distca.errors import DistcaError
from distca.simulate import MODELS, Cluster, Job, Workload
from distca.simulate.job import Fp8
from distca.simulate.kernel_rate import at_rate
from distca.simulate.memory import with_servers
from distca.simulate.sweep import BEST, BEST_HIDDEN, Outcome, run_mode
from distca.versions import command_line, versions, write_report

TP, SEED, TOKENS = 8, 1234, 131_072
FA2_TFLOPS = 310.0
"""TFLOP/s of a long document's forward with flash-attention-2; the shipped table has flash-attn-4 at 640."""
GPUS = {("4D", "34b"): (128, 256, 512)}
"""Numbers of GPUs, where they are not 64, 128 and 256."""
STAGES = {("4D", "8b"): 2, ("4D", "34b"): 4}
BATCHES = {
    ("3D", "8b"): {128: (8, 16, 32), 256: (4, 8, 16), 512: (2, 4, 8)},
    ("3D", "34b"): {128: (4, 8, 16), 256: (2, 4, 8), 512: (2, 4, 8)},
    ("4D", "8b"): {128: (32, 64, 128), 256: (16, 32, 32), 512: (8, 8, 16)},
    ("4D", "34b"): {128: (32, 64, 128), 256: (16, 32, 32), 512: (8, 8, 16)},
}
"""Documents as long as the context in a global batch, by kind, model and context in K, for three numbers of GPUs."""
PAPER = {
    ("3D", "8b", "pretrain"): (1.07, 1.20),
    ("3D", "34b", "pretrain"): (1.07, 1.20),
    ("3D", "8b", "prolong"): (1.05, 1.12),
    ("3D", "34b", "prolong"): (1.05, 1.12),
    ("4D", "8b", "pretrain"): (1.15, 1.30),
    ("4D", "8b", "prolong"): (1.10, 1.35),
    ("4D", "34b", "pretrain"): (1.0, 1.15),
    ("4D", "34b", "prolong"): (1.0, 1.25),
}
"""Speed-ups that the paper measured."""
Kernel = Literal["flash4", "flash2"]
KERNELS: dict[Kernel, str] = {"flash4": "flash-attn-4", "flash2": "310 TFLOP/s"}


@dataclass(frozen=True)
class GridCell:
    """One comparison.

    Attributes:
        kind: "3D", or "4D" with pipeline stages.
        model: name of the shape.
        mix: of documents, in its long-context version.
        context: longest document, in K tokens.
        gpus: of the cluster.
        batch: documents as long as the context that a global batch's tokens make.
        kernel: core attention's.
        fp8: of linear layers.
    """

    kind: str
    model: str
    mix: Mix
    context: int
    gpus: int
    batch: int
    kernel: Kernel
    fp8: Fp8 = "none"

    @property
    def stages(self) -> int:
        return STAGES.get((self.kind, self.model), 1)

    def job(self) -> Job:
        """The run of this case; micro-batches leave 128K tokens to a server, or the batch's share if that is less."""
        ranks = self.gpus // TP // self.stages
        share = self.batch * self.context * 1024 // ranks
        micro_batches = max(share // TOKENS, 1)
        cost = costs_of("NVIDIA H200", MODELS[self.model], TP).full
        return Job(
            MODELS[self.model],
            Cluster(self.gpus),
            cost if self.kernel == "flash4" else at_rate(cost, FA2_TFLOPS),
            tp=TP,
            pp=self.stages,
            tokens_per_rank=share // micro_batches,
            micro_batches=micro_batches,
            fp8=self.fp8,
        )


def gpu_counts(kind: str, model: str) -> tuple[int, int, int]:
    """A smaller, a middle and a larger number of GPUs."""
    return GPUS.get((kind, model), (64, 128, 256))


def grid(fp8: Fp8 = "none") -> Iterator[GridCell]:
    """The paper's cells, in bfloat16 with both kernels."""
    kernels = ("flash4", "flash2") if fp8 == "none" else ("flash4",)
    for (kind, model), contexts in BATCHES.items():
        for mix, kernel in product(("pretrain", "prolong"), kernels):
            for context, batches in contexts.items():
                for gpus, batch in zip(gpu_counts(kind, model), batches, strict=True):
                    yield GridCell(kind, model, mix, context, gpus, batch, kernel, fp8)  # type: ignore[arg-type]


def pools(servers: list[int], contexts: list[int]) -> Iterator[GridCell]:
    """8B without stages on pools of many servers, 128K tokens on each."""
    for count, context, mix in product(servers, contexts, ("pretrain", "prolong")):
        if count * 128 >= context:
            yield GridCell("3D", "8b", mix, context, count * TP, count * 128 // context, "flash4")  # type: ignore[arg-type]


def workloads(cell: GridCell, job: Job, steps: int) -> list[Workload]:
    """Global batches, drawn and packed as the throughput benchmark does."""
    drawn = draw_batches(
        Cell(cell.mix, cell.context * 1024),
        steps,
        ranks=job.data_parallel,
        tokens_per_rank=job.tokens_per_rank,
        micro_batches=job.micro_batches,
        vocabulary=256,
        seed=SEED,
    )
    return [Workload(each, drawn.bins) for each in drawn.global_batches]


def run_cell(cell: GridCell, steps: int) -> dict[str, Any]:
    """All modes of a cell, and DistCA's speed over the others."""
    job = cell.job()
    drawn = workloads(cell, job, steps)
    found = asdict(cell) | {
        "servers": job.servers,
        "data_parallel": job.data_parallel,
        "stages": job.pp,
        "micro_batches": job.micro_batches,
        "tokens_per_rank": job.tokens_per_rank,
        "modes": {},
    }
    own: float | None = None
    for name in ("distca", BEST, BEST_HIDDEN):
        ran = fitting(job, name, drawn)
        if isinstance(ran, str):
            found["modes"][name] = {"refused": ran}
            continue
        outcome, (recompute, backward) = ran
        figures = outcome.figures() | {"recompute": recompute, "backward": backward}
        own = figures["tokens_per_s"] if name == "distca" else own
        if own is not None:
            figures["distca_over_it"] = own / figures["tokens_per_s"]
        found["modes"][name] = figures
    return found


def fitting(job: Job, name: str, drawn: list[Workload]) -> tuple[Outcome, tuple[str, str]] | str:
    """A mode with what it computes again, and whether rows are sent again: the first choice that fits into memory, in
    the order of training's ``auto``. Why not where nothing fits."""
    said = ""
    backward = ("keep", "resend") if name == "distca" and job.pp == 1 else ("keep",)
    for how, sent in product(("none", "mlp", "all"), backward):
        trial = replace(job, recompute=how, backward=sent)  # type: ignore[arg-type]
        if name == "distca" and _least_bytes(trial) > job.cluster.memory_gib * 2**30:
            continue  # before it is planned for nothing
        try:
            outcome = run_mode(trial, name, drawn)
        except DistcaError as error:
            said = str(error)
            continue
        if outcome.memory_bytes <= job.cluster.memory_gib * 2**30:
            return outcome, (how, "resend" if trial.resend else "keep")
        said = f"needs {outcome.memory_bytes / 2**30:.0f} GiB with everything recomputed"
    return said


def _least_bytes(job: Job) -> float:
    """Bytes that the first stage's rank holds with DistCA at least: its own rows, of all micro-batches in flight."""
    rows = np.full(1, job.tokens_per_rank)
    flight = np.full(1, min(2 * job.pp - 1, job.micro_batches))
    return float(with_servers(job, rows, rows, rows, np.zeros(1), flight)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--picture", type=Path, help="picture of the speed-ups")
    parser.add_argument("--steps", type=int, default=3, help="global batches of a cell")
    parser.add_argument("--go-on", action="store_true", help="keep the cells that are in the output already")
    parser.add_argument("--pools", action="store_true", help="pools of many servers in place of the paper's grid")
    parser.add_argument("--fp8", choices=get_args(Fp8), default="none", help="linear layers of the paper's grid")
    parser.add_argument("--servers", type=int, nargs="+", default=[64, 256, 1024, 2048, 4096, 8192])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 1024, 4096], help="in K tokens")
    arguments = parser.parse_args()
    logging.getLogger("distca").setLevel(logging.WARNING)
    cells = list(pools(arguments.servers, arguments.contexts) if arguments.pools else grid(arguments.fp8))
    report: dict[str, Any] = {
        "command": command_line("python -m benchmarks.paper_grid"),
        "versions": versions(),
        "simulated": True,
        "steps": arguments.steps,
        "cells": [],
    }
    known: dict[GridCell, dict[str, Any]] = {}
    if arguments.go_on and arguments.output.exists():
        names = [field.name for field in fields(GridCell)]
        for found in json.loads(arguments.output.read_text())["cells"]:
            known[GridCell(**{name: found[name] for name in names})] = found
    for cell in track(cells, description="Simulating"):
        report["cells"].append(known.get(cell) or run_cell(cell, arguments.steps))
        write_report(arguments.output, report)
    if arguments.picture:
        draw(report["cells"], arguments.picture)


def draw(cells: list[dict[str, Any]], path: Path) -> None:
    """Speed-ups by model and mix, without and with stages, beside the range that the paper measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.5, 7), layout="constrained")
    figure.suptitle("DistCA's speed over the best degree of context parallelism, simulated: TP 8, 50 GB/s per GPU")
    panels = list(product(("8b", "34b"), ("pretrain", "prolong")))
    for (row, kind), (column, (model, mix)) in product(enumerate(("3D", "4D")), enumerate(panels)):
        axes = figure.add_subplot(2, 4, row * 4 + column + 1)
        low, high = PAPER[kind, model, mix]
        axes.axhspan(low, high, color="0.9", label="paper, measured")
        axes.axhline(1.0, color="black", linewidth=0.8)
        ticks: list[str] = []
        for color, (kernel, base) in zip(
            ("#2b6cb0", "#90b8de", "#d1662f", "#edb893"),
            product(KERNELS, (BEST, BEST_HIDDEN)),
            strict=True,
        ):
            chosen = [
                cell
                for cell in cells
                if (cell["kind"], cell["model"], cell["mix"], cell["kernel"]) == (kind, model, mix, kernel)
            ]
            ticks = [f"{cell['context']}K\n{cell['gpus']}" for cell in chosen]
            values = [cell["modes"][base].get("distca_over_it", np.nan) for cell in chosen]
            exposed = "exposed" if base == BEST else "hidden"
            axes.plot(range(len(values)), values, "o", color=color, label=f"{KERNELS[kernel]}, gathers {exposed}")
        axes.set_xticks(range(len(ticks)), ticks, fontsize=7)
        axes.set(title=f"{kind}, {model.upper()}, {mix}", ylim=(0.9, None))
        if column == 0:
            axes.set_ylabel("speed-up")
        if row:
            axes.set_xlabel("longest document, GPUs", fontsize=8)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
