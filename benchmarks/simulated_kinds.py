"""Models whose layers have windows and sinks, simulated: a plan for each kind against one plan and against the others.

    python -m benchmarks.simulated_kinds --output benchmarks/results/simulated_kinds.json

Gemma-3-like, OLMo-3-like and gpt-oss-like shapes (``distca.simulate.MODELS``) in bfloat16, on pools of 64 and 512
servers of 8 GPUs. Each server has 128K tokens of the long-context mixes, and 50 GB/s per GPU to others.
"distca-one-plan" gives layers with windows the plan and the rows of those without. Of context parallelism there are
four: with gathers in every layer, or with nothing but the rows that windows see in layers that have one ("halo"),
waited for or hidden. Each mode recomputes the least that fits into memory. Seconds of attention are those of an H100
for whole documents (flash-attn-4 4.0.0b36), all else is the H200's.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from benchmarks.paper_grid import fitting
from distca.commands.simulate_inputs import draw
from distca.plan.cost.analytic import AnalyticCost, analytic_cost
from distca.simulate import MODELS, Cluster, Job, Workload
from distca.simulate.sweep import BEST, HALO, HIDDEN
from distca.versions import command_line, versions, write_report

TP, SEED, TOKENS = 8, 1234, 131_072
ONE_PLAN = "distca-one-plan"
MODES = ("distca", ONE_PLAN, "packed", BEST, BEST + HIDDEN, BEST + HALO, BEST + HALO + HIDDEN)


@dataclass(frozen=True)
class Measured:
    """One long document on an H100.

    Attributes:
        heads: query heads.
        rows: tokens of it.
        forward: milliseconds.
        backward: milliseconds.
    """

    heads: int
    rows: int
    forward: float
    backward: float


FULL = {
    "gemma-3-like": Measured(16, 65_536, 47, 259),
    "olmo-3-like": Measured(32, 131_072, 216, 583),
    "gpt-oss-like": Measured(64, 65_536, 63, 166),
}
WINDOWS = {
    "gemma-3-like": Measured(16, 131_072, 3.6, 24.5),
    "olmo-3-like": Measured(32, 131_072, 14.6, 43.6),
    "gpt-oss-like": Measured(64, 131_072, 2.6, 10.7),
}
"""In layers with a window. OLMo's were measured with 8 key/value heads for 32 query heads."""


def cost_of(name: str, measured: Measured, window: int) -> AnalyticCost:
    """The analytic cost for a server's heads, scaled to what the document took."""
    shape = MODELS[name].attention_shape(TP)
    cost = replace(analytic_cost(shape.heads, shape.kv_heads, shape.head_dim), window=window)
    rows, share = np.array([measured.rows]), shape.heads / measured.heads / 1e3
    forward, backward = (float(getattr(cost, way)(rows, rows)[0]) for way in ("forward", "backward"))
    return cost.times(measured.forward * share / forward, measured.backward * share / backward)


def job_of(name: str, servers: int) -> Job:
    """A model on a pool."""
    model = MODELS[name]
    window = max(model.windows)
    costs = {window: cost_of(name, WINDOWS[name], window)}
    cost = cost_of(name, FULL[name], 0)
    return Job(model, Cluster(servers * TP), cost, tp=TP, tokens_per_rank=TOKENS, window_costs=costs)


def run_cell(job: Job, drawn: list[Workload]) -> dict[str, Any]:
    """All modes on the same documents, and the speed of a plan for each kind over theirs; why not where one does not
    fit."""
    found: dict[str, Any] = {}
    for mode in MODES:
        one_plan = mode == ONE_PLAN
        ran = fitting(replace(job, plan_by_kind=not one_plan), "distca" if one_plan else mode, drawn)
        if isinstance(ran, str):
            found[mode] = {"refused": ran}
            continue
        outcome, (recompute, backward) = ran
        figures = outcome.figures() | {"mode": mode, "recompute": recompute, "backward": backward}
        own = figures if mode == "distca" else found["distca"]
        found[mode] = figures | {"distca_over_it": own["tokens_per_s"] / figures["tokens_per_s"]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--steps", type=int, default=3, help="global batches of a cell")
    parser.add_argument("--models", nargs="+", choices=sorted(FULL), default=list(FULL))
    parser.add_argument("--mixes", nargs="+", choices=("pretrain", "prolong"), default=["pretrain", "prolong"])
    parser.add_argument("--servers", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512], help="in K tokens")
    arguments = parser.parse_args()
    logging.getLogger("distca").setLevel(logging.WARNING)
    cells: list[dict[str, Any]] = []
    report = {
        "command": command_line("python -m benchmarks.simulated_kinds"),
        "versions": versions(),
        "simulated": True,
        "steps": arguments.steps,
        "cells": cells,
    }
    cases = list(product(arguments.models, arguments.mixes, arguments.contexts, arguments.servers))
    for name, mix, context, servers in track(cases, description="Simulating"):
        job = job_of(name, servers)
        drawn = draw(f"{mix}-long", job, context * 1024, SEED, arguments.steps)
        case = {"model": name, "mix": mix, "context": context, "servers": servers, "tokens_per_rank": TOKENS}
        cells.append(case | {"modes": run_cell(job, drawn)})
        write_report(arguments.output, report)


if __name__ == "__main__":
    main()
