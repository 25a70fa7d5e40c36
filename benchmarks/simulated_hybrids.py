"""Hybrid stacks simulated, with the exchanges of their recurrent layers: DistCA against packed documents and the best
context parallelism.

    python -m benchmarks.simulated_hybrids --output benchmarks/results/simulated_hybrids.json

Qwen3.5's 9B and 27B in bfloat16, 128K tokens of the long-context mixes per four GPUs, 8 GPUs a node with 50 GB/s each
between nodes. Each mode takes the fastest of 4, 2 and 1 tensor-parallel ranks and of one or two micro-batches. Each
server then has as many tokens less. It recomputes the least that fits into memory. In recurrent layers context
parallelism exchanges heads, as Megatron-Core does. "free-heads" counts these exchanges as nothing, which no way to run
these layers over ranks beats, and "free-summaries" those of DistCA's summaries. "hidden" counts gathers and exchanges
only as far as they are longer than what lies beside. Seconds of attention are those of an H100 for heads of 256 and a
document of 64K. Those of recurrent cores are fla 0.5.1's on an H200 (distca/plan/cost/recurrent.py). All else is the
H200's.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from benchmarks.paper_grid import fitting
from benchmarks.simulated_kinds import FULL
from distca.commands.simulate_inputs import draw
from distca.errors import DistcaError
from distca.plan.cost.analytic import AnalyticCost, analytic_cost
from distca.plan.recurrent.traffic import recurrent_nanos
from distca.simulate import MODELS, Cluster, Job, Workload
from distca.simulate.cad import planned
from distca.simulate.sweep import BEST, HIDDEN
from distca.versions import command_line, versions, write_report

TENSOR_PARALLEL, SEED, TOKENS = (4, 2, 1), 1234, 131_072
"""Tokens of a server of four GPUs."""
MICRO_BATCHES = (1, 2)
FREE, FREE_SUMMARIES = "-free-heads", "-free-summaries"
MODES = ("distca", "packed", BEST, BEST + HIDDEN, BEST + FREE, BEST + FREE + HIDDEN)
NAMES = ("qwen3.5-9b", "qwen3.5-27b")


def cost_of(name: str, tp: int) -> AnalyticCost:
    """The analytic cost for the heads of a GPU, scaled to what a document takes in 16 heads of 256."""
    shape, measured = MODELS[name].attention_shape(tp), FULL["gemma-3-like"]
    cost = analytic_cost(shape.heads, shape.kv_heads, shape.head_dim)
    rows, share = np.array([measured.rows]), shape.heads / measured.heads / 1e3
    forward, backward = (float(getattr(cost, way)(rows, rows)[0]) for way in ("forward", "backward"))
    return cost.times(measured.forward * share / forward, measured.backward * share / backward)


def jobs_of(name: str, gpus: int, network_gb_s: float = 50.0) -> list[Job]:
    """A model on a cluster, in all ways that are tried."""
    cluster = Cluster(gpus, network_gb_s=network_gb_s)
    return [
        Job(
            MODELS[name],
            cluster,
            cost_of(name, tp),
            tp=tp,
            micro_batches=many,
            tokens_per_rank=TOKENS * tp // 4 // many,
        )
        for tp, many in product(TENSOR_PARALLEL, MICRO_BATCHES)
    ]


def run_mode(jobs: list[Job], mode: str, draws: Callable[[Job], list[Workload]]) -> dict[str, Any]:
    """The figures of the fastest job; why not where none fits."""
    found: dict[str, Any] = {"refused": "nothing fits"}
    for job in jobs:
        try:
            drawn = draws(job)
        except DistcaError as error:
            found = {"refused": str(error)} if "refused" in found else found
            continue
        trial = replace(job, move_heads=FREE not in mode, move_summaries=FREE_SUMMARIES not in mode)
        ran = fitting(trial, mode.replace(FREE, "").replace(FREE_SUMMARIES, ""), drawn)
        if isinstance(ran, str):
            found = {"refused": ran} if "refused" in found else found
            continue
        outcome, (recompute, backward) = ran
        figures = outcome.figures() | {
            "mode": mode,
            "tp": job.tp,
            "micro_batches": job.micro_batches,
            "recompute": recompute,
            "backward": backward,
        }
        if mode == "distca":
            figures |= _summaries(replace(trial, recompute=recompute, backward=backward), drawn[0])  # type: ignore[arg-type]
        if "refused" in found or figures["step_s"] < found["step_s"]:
            found = figures
    return found


def _summaries(job: Job, workload: Workload) -> dict[str, Any]:
    """Figures of one recurrent layer in a step: GiB that travel between all GPUs; MiB of summaries on the busiest GPU's
    links in one direction; and most summaries that a rank reads in forward."""
    what = job.recurrence
    halves = [half for layouts in planned(job, workload).layouts for half in recurrent_nanos(layouts, what.halo_rows)]
    sent = np.zeros((2, job.servers))
    for half in halves:
        for of in (half.forward, half.backward):
            for pairs, size in ((of.states, what.state_bytes), (of.transitions, what.transition_bytes)):
                sent += size * np.stack((pairs.sent, pairs.received))
    return {
        "summaries_gib_per_layer": sum(half.travelling_bytes(what) for half in halves) * job.tp / 2**30,
        "summaries_mib_busiest": float(sent.max()) / 2**20,
        "summaries_read": int(np.sum([half.forward.read for half in halves], axis=0).max()),
    }


def run_cell(jobs: list[Job], draws: Callable[[Job], list[Workload]], modes: Sequence[str] = MODES) -> dict[str, Any]:
    """All modes on documents of the same draw, and DistCA's speed over theirs."""
    found = {mode: run_mode(jobs, mode, draws) for mode in modes}
    for figures in found.values():
        if "refused" not in figures and "refused" not in found.get("distca", {"refused": ""}):
            figures["distca_over_it"] = found["distca"]["tokens_per_s"] / figures["tokens_per_s"]
    return found


def _drawn(mix: str, context: int, steps: int, job: Job) -> list[Workload]:
    return draw(mix, job, context, SEED, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--steps", type=int, default=3, help="global batches of a cell")
    parser.add_argument("--modes", nargs="+", choices=(*MODES, "distca" + FREE_SUMMARIES), default=list(MODES))
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--mixes", nargs="+", choices=("pretrain", "prolong"), default=["pretrain", "prolong"])
    parser.add_argument("--gpus", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 2048], help="in K tokens")
    parser.add_argument("--network_gb_s", type=float, default=50.0, help="GB/s of a GPU between nodes")
    arguments = parser.parse_args()
    logging.getLogger("distca").setLevel(logging.WARNING)
    cells: list[dict[str, Any]] = []
    report = {
        "command": command_line("python -m benchmarks.simulated_hybrids"),
        "versions": versions(),
        "simulated": True,
        "steps": arguments.steps,
        "tokens_per_gpu": TOKENS // 4,
        "cells": cells,
    }
    cases = list(product(arguments.models, arguments.mixes, arguments.contexts, arguments.gpus))
    cases = [case for case in cases if case[2] * 1024 <= TOKENS // 4 * case[3]]  # a document fits
    for name, mix, context, gpus in track(cases, description="Simulating"):
        jobs = jobs_of(name, gpus, arguments.network_gb_s)
        draws = partial(_drawn, f"{mix}-long", context * 1024, arguments.steps)
        case = {"model": name, "mix": mix, "context": context, "gpus": gpus}
        cells.append(case | {"modes": run_cell(jobs, draws, arguments.modes)})
        write_report(arguments.output, report)


if __name__ == "__main__":
    main()
