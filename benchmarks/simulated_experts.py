"""Mixtures of experts simulated, with the rows that travel to experts and back: DistCA against packed documents and
the best context parallelism.

    python -m benchmarks.simulated_experts --output benchmarks/results/simulated_experts.json

Qwen3-30B-A3B and 235B-A22B in bfloat16, TP 4, 128K tokens of the long-context mixes per four GPUs, 8 GPUs a node with
50 GB/s each between nodes. Every mode has the same experts and takes the fewest expert-parallel ranks and the least
recomputation that fit into memory. Rows count as if every expert got equally many; experts' products run at the rate
of dense ones. In "distca", "packed" and "best-cp" rows of experts are waited for, as training does.
"distca-hidden-experts" sends one half's beside the other half's computation, and "best-cp-hidden" counts gathers and
experts' rows only as far as they are longer than what lies beside. "once-per-node" sends a row once to each node that
has some of its experts. Seconds of attention are the H200's where a table has these heads, else modelled.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.paper_grid import fitting
from distca.commands.simulate_inputs import draw, read_costs
from distca.simulate import MODELS, Cluster, Job, Workload
from distca.simulate.sweep import BEST, HIDDEN
from distca.versions import command_line, versions, write_report

TP, SEED, TOKENS = 4, 1234, 131_072
EXPERT_RANKS = (8, 16, 32, 64)
HIDDEN_EXPERTS, ONCE = "distca-hidden-experts", "distca-hidden-experts-once-per-node"
MODES = ("distca", HIDDEN_EXPERTS, ONCE, "packed", BEST, BEST + HIDDEN)
NAMES = ("qwen3-30b-a3b", "qwen3-235b-a22b")


def job_of(name: str, gpus: int) -> Job:
    """A model on a cluster, with experts on one node."""
    model = MODELS[name]
    cost = read_costs(model, TP, None, None)
    return Job(model, Cluster(gpus), cost, tp=TP, ep=EXPERT_RANKS[0], tokens_per_rank=TOKENS)


def run_mode(job: Job, mode: str, drawn: list[Workload]) -> dict[str, Any]:
    """A mode's figures with the fewest expert-parallel ranks that fit; why not where none do."""
    said = ""
    job = replace(job, hide_experts=mode in (HIDDEN_EXPERTS, ONCE), once_per_node=mode == ONCE)
    name = "distca" if mode in (HIDDEN_EXPERTS, ONCE) else mode
    for ep in EXPERT_RANKS:
        if job.cluster.gpus % ep:
            continue
        ran = fitting(replace(job, ep=ep), name, drawn)
        if not isinstance(ran, str):
            outcome, (recompute, backward) = ran
            return outcome.figures() | {"mode": mode, "ep": ep, "recompute": recompute, "backward": backward}
        said = ran
    return {"refused": said}


def run_cell(job: Job, drawn: list[Workload]) -> dict[str, Any]:
    """All modes on the same documents; of the others DistCA's speed over theirs, with experts' rows waited for and
    hidden."""
    found: dict[str, Any] = {}
    for mode in MODES:
        if mode == ONCE and found[HIDDEN_EXPERTS].get("ep", 0) <= job.cluster.gpus_per_node:
            continue  # nothing leaves the node
        found[mode] = run_mode(job, mode, drawn)
    for figures in found.values():
        for name, mine in (("distca_over_it", "distca"), ("hidden_experts_over_it", HIDDEN_EXPERTS)):
            if "refused" not in figures and "refused" not in found[mine]:
                figures[name] = found[mine]["tokens_per_s"] / figures["tokens_per_s"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--steps", type=int, default=3, help="global batches of a cell")
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES))
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
        "steps": arguments.steps,
        "tp": TP,
        "tokens_per_server": TOKENS,
        "cells": cells,
    }
    cases = list(product(arguments.models, arguments.mixes, arguments.contexts, arguments.gpus))
    for name, mix, context, gpus in track(cases, description="Simulating"):
        job = job_of(name, gpus)
        drawn = draw(f"{mix}-long", job, context * 1024, SEED, arguments.steps)
        case = {"model": name, "mix": mix, "context": context, "gpus": gpus}
        cells.append(case | {"modes": run_cell(job, drawn)})
        write_report(arguments.output, report)


if __name__ == "__main__":
    main()
