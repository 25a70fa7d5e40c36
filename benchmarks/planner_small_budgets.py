"""How level backward is in pipelines with small budgets; writes results/planner_small_budgets.json.

    OMP_NUM_THREADS=1 python -m benchmarks.planner_small_budgets

Steps of four or eight micro-batches, contexts and budgets of 16K tokens per rank, two halves, attention alone levelled:
the slowest servers' seconds, added up over a step's phases, over the mean server's, and over the mean server's without
the work that cuts add. Predicted by the package's table of an H200; nothing runs on GPUs.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from distca.data.mixes import Mix, sample_long_context
from distca.plan import PlanOptions, plan_at_home, plan_step, server_seconds
from distca.plan.cost.model import Direction
from distca.plan.cost.table_file import find_table
from distca.plan.phases import Phase
from distca.versions import versions, write_report

TOKENS, STEPS = 16_384, 2
POOLS = ((2, 2, 4), (4, 2, 8), (2, 4, 8), (8, 4, 8))
"""Data-parallel ranks, stages and micro-batches."""
RESULTS = Path(__file__).parent / "results" / "planner_small_budgets.json"
MIXES: tuple[Mix, ...] = ("pretrain", "prolong")
COST = find_table("NVIDIA H200", "flash4", 32, 8, 128)
assert COST is not None


def over_mean(phases: tuple[Phase, ...], direction: Direction) -> tuple[float, float]:
    """The slowest servers over the mean, and over the mean without what cuts add, over all phases."""
    assert COST is not None
    slowest = mean = uncut = 0.0
    for phase in phases:
        seconds = np.sum([server_seconds(plan, COST, direction) for plan in phase.plans], axis=0)
        slowest, mean = slowest + float(seconds.max()), mean + float(seconds.mean())
        homes = [plan_at_home(plan.layout) for plan in phase.plans]
        uncut += sum(float(server_seconds(home, COST, direction).mean()) for home in homes)
    return slowest / mean, slowest / uncut


def case(mix: Mix, ranks: int, stages: int, micro_batches: int, dealt: bool) -> dict[str, float]:
    """Means over steps."""
    assert COST is not None
    options = PlanOptions(ranks, COST, stages=stages, nano_batches=2, resend=True)
    found = np.zeros(5)
    for seed in range(STEPS):
        drawn = [sample_long_context(mix, ranks * TOKENS, TOKENS, 100 * seed + at) for at in range(micro_batches)]
        began = time.process_time()
        made = plan_step(drawn, options, room=[ranks * TOKENS + 2048] * micro_batches if dealt else None)
        took = time.process_time() - began
        found += (*over_mean(made.forward, "forward"), *over_mean(made.backward, "backward"), took)
    names = ("forward", "forward_over_uncut", "backward", "backward_over_uncut", "cpu_s")
    return dict(zip(names, (found / STEPS).round(3).tolist(), strict=True))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    cases = {}
    for ranks, stages, micro_batches in POOLS:
        for mix in MIXES:
            for dealt in (False, True):
                name = f"{mix} {ranks} × {stages}, {micro_batches} micro-batches, {'dealt anew' if dealt else 'packed'}"
                cases[name] = case(mix, ranks, stages, micro_batches, dealt)
                print(f"{name}: {cases[name]}", flush=True)
    command = "OMP_NUM_THREADS=1 python -m benchmarks.planner_small_budgets"
    write_report(RESULTS, {"command": command, "versions": versions(), "steps": STEPS, "cases": cases})


if __name__ == "__main__":
    main()
