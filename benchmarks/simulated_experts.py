"""Mixtures of experts simulated, with the rows that travel to experts and back: DistCA against packed documents and
the best context parallelism.

    python -m benchmarks.simulated_experts --output benchmarks/results/simulated_experts.json

Qwen3-30B-A3B and 235B-A22B in bfloat16, TP 4, 128K tokens of the long-context mixes per four GPUs. Nodes have 8 GPUs,
with 50 GB/s each between nodes. Of 235B there are two micro-batches of half as many tokens, with which DistCA
fits into memory; packed documents stay whole. Every mode has the same experts and takes the fewest expert-parallel
ranks and the least recomputation that fit into memory. Rows count as if every expert got equally many; experts'
products run at the rate of dense ones. A row travels once to each rank that has one of its experts. In "distca",
"packed" and "best-cp" rows of experts are waited for. "distca-hidden-experts" sends one nano-batch's beside the other's
computation, as training does unless layers are recomputed as wholes. "best-cp-hidden" counts gathers and experts' rows
only as far as they are longer than what lies beside. "once-per-node" sends a row once to each node that has some of its
experts. Seconds of attention are the H200's where a table has these heads, else modelled.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.paper_grid import fitting
from distca.commands.simulate_inputs import draw, read_costs
from distca.simulate import MODELS as SHAPES
from distca.simulate import Cluster, Job, Workload, sweep
from distca.simulate.memory import static_bytes
from distca.simulate.sweep import BEST, HIDDEN
from distca.versions import command_line, versions, write_report

TP, SEED, TOKENS = 4, 1234, 131_072
EXPERT_RANKS = (8, 16, 32, 64)
HIDDEN_EXPERTS, ONCE = "distca-hidden-experts", "distca-hidden-experts-once-per-node"
MODES: dict[str, dict[str, tuple[str, dict[str, bool]]]] = {
    "distca": {HIDDEN_EXPERTS: ("distca", {}), ONCE: ("distca", {"once_per_node": True})},
    "packed": {},
    BEST: {BEST + HIDDEN: (BEST + HIDDEN, {})},
}
"""Modes, and what is run with the same recomputation and ranks beside them."""
MICRO_BATCHES = {"qwen3-30b-a3b": 1, "qwen3-235b-a22b": 2}
"""Micro-batches of a step. In two of 64K tokens the rows of 94 layers fit, which DistCA keeps for backward."""
STEPS = {"qwen3-30b-a3b": 3, "qwen3-235b-a22b": 1}
"""Global batches of a cell."""


def job_of(name: str, gpus: int) -> Job:
    """A model on a cluster, with experts on one node."""
    model = SHAPES[name]
    cost = read_costs(model, TP, None, None)
    many = MICRO_BATCHES[name]
    tokens = TOKENS // many
    return Job(model, Cluster(gpus), cost, tp=TP, ep=EXPERT_RANKS[0], tokens_per_rank=tokens, micro_batches=many)


def run_mode(job: Job, mode: str, draws: Callable[[Job], list[Workload]]) -> tuple[Job, dict[str, Any]]:
    """The job with the fewest expert-parallel ranks that fit, and its figures; why not where none do."""
    said = "the model's state alone does not fit"
    if mode == "packed":  # whole documents
        job = replace(job, tokens_per_rank=TOKENS, micro_batches=1)
    drawn = draws(job)
    for ep in EXPERT_RANKS:
        trial = replace(job, ep=ep if job.cluster.gpus % ep == 0 else 1)
        if trial.ep == 1 or static_bytes(trial) > job.cluster.memory_gib * 2**30:
            continue
        ran = fitting(trial, mode, drawn)
        if not isinstance(ran, str):
            outcome, (recompute, backward) = ran
            chosen: Any = {"recompute": recompute, "backward": backward}
            return replace(trial, **chosen), outcome.figures() | {"ep": ep} | chosen
        said = ran
    return job, {"refused": said}


def run_cell(job: Job, draws: Callable[[Job], list[Workload]]) -> dict[str, Any]:
    """All modes on documents of the same draw; of the others DistCA's speed over theirs, with experts' rows waited for
    and hidden."""
    found: dict[str, Any] = {}
    for mode, also in MODES.items():
        chosen, found[mode] = run_mode(job, mode, draws)
        if "refused" in found[mode]:
            continue
        for name, (as_mode, changes) in also.items():  # which memory does not depend on
            if name == ONCE and chosen.ep <= job.cluster.gpus_per_node:
                continue  # nothing leaves the node
            changed: Any = changes | ({"hide_experts": True} if mode == "distca" else {})
            outcome = sweep.run_mode(replace(chosen, **changed), as_mode, draws(chosen))
            found[name] = found[mode] | outcome.figures() | {"mode": name}
    for figures in found.values():
        for name, mine in (("distca_over_it", "distca"), ("hidden_experts_over_it", HIDDEN_EXPERTS)):
            if "refused" not in figures and "refused" not in found.get(mine, {"refused": ""}):
                figures[name] = found[mine]["tokens_per_s"] / figures["tokens_per_s"]
    return found


def _drawn(mix: str, context: int, steps: int, job: Job) -> list[Workload]:
    return draw(mix, job, context, SEED, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--models", nargs="+", choices=list(MICRO_BATCHES), default=list(MICRO_BATCHES))
    parser.add_argument("--mixes", nargs="+", choices=("pretrain", "prolong"), default=["pretrain", "prolong"])
    parser.add_argument("--gpus", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512], help="in K tokens")
    arguments = parser.parse_args()
    logging.getLogger("distca").setLevel(logging.WARNING)
    cells: list[dict[str, Any]] = []
    report = {
        "command": command_line("python -m benchmarks.simulated_experts"),
        "versions": versions(),
        "simulated": True,
        "tp": TP,
        "tokens_per_server": TOKENS,
        "cells": cells,
    }
    cases = list(product(arguments.models, arguments.mixes, arguments.contexts, arguments.gpus))
    for name, mix, context, gpus in track(cases, description="Simulating"):
        job = job_of(name, gpus)
        draws = partial(_drawn, f"{mix}-long", context * 1024, STEPS[name])
        case = {"model": name, "mix": mix, "context": context, "gpus": gpus, "steps": STEPS[name]}
        cells.append(case | {"modes": run_cell(job, draws)})
        write_report(arguments.output, report)


if __name__ == "__main__":
    main()
