"""What a finer tolerance wins and costs in pools of few servers, by the measured cost table of an H200; needs no GPU.

    python -m benchmarks.small_pools --output benchmarks/results/small_pools.json

Plans the global batches that the throughput benchmark draws (long-context mixes, 128K tokens per rank, two halves) with
several tolerances. "slowest / mean" adds up every half's slowest server, forward and backward, over the mean.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.throughput.batches import Batches, draw_batches, lengths_of
from benchmarks.throughput.settings import Cell
from distca.commands.versions import versions
from distca.plan import server_seconds
from distca.plan.cost.model import CostModel
from distca.plan.cost.table_file import find_table
from distca.plan.micro_batch import MicroBatchPlan, plan_micro_batch

TOKENS, BATCHES, SEED = 131_072, 20, 1234
TOLERANCES = (0.02, 0.01, 0.005, 0.002)
SERVERS = (2, 4, 8, 16, 32)
CELLS = (Cell("pretrain", TOKENS), Cell("prolong", TOKENS), Cell("pretrain", 2 * TOKENS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    output = parser.parse_args().output
    cost = find_table("NVIDIA H200", "flash4", 32, 8, 128)
    assert cost is not None, "shipped with the package"
    combinations = [(servers, cell) for servers in SERVERS for cell in CELLS]
    pools = [_pool(cost, servers, cell) for servers, cell in track(combinations, "planning")]
    report = {
        "command": shlex.join(["python", "-m", "benchmarks.small_pools", *sys.argv[1:]]),
        "versions": versions(),
        "pools": pools,
    }
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    _show(pools)


def _pool(cost: CostModel, servers: int, cell: Cell) -> dict[str, Any]:
    batches = draw_batches(
        cell, BATCHES, ranks=servers, tokens_per_rank=TOKENS, micro_batches=1, vocabulary=128_256, seed=SEED
    )
    by_tolerance = [{"tolerance": each} | _figures(cost, batches, servers, each) for each in TOLERANCES]
    return {"servers": servers, "workload": cell.name, "by_tolerance": by_tolerance}


def _figures(cost: CostModel, batches: Batches, servers: int, tolerance: float) -> dict[str, float]:
    plans = [
        plan_micro_batch(lengths_of(batch), servers, cost, nano_batches=2, tolerance=tolerance)
        for batch in batches.global_batches
    ]
    slowest, mean = (sum(column) for column in zip(*(_seconds(plan) for plan in plans), strict=True))
    return {
        "slowest_over_mean": slowest / mean,
        "slowest_s": slowest,
        "moved_gib_per_layer": statistics.fmean(plan.bytes_moved.total for plan in plans) / 2**30,
        "plan_ms": statistics.median(plan.planning_ms for plan in plans),
    }


def _seconds(plan: MicroBatchPlan) -> tuple[float, float]:
    """Of the slowest server, of the mean."""
    each = [
        server_seconds(half.forward, plan.cost, direction)
        for half in plan.nano_batches
        for direction in ("forward", "backward")
    ]
    return float(sum(seconds.max() for seconds in each)), float(sum(seconds.mean() for seconds in each))


def _show(pools: list[dict[str, Any]]) -> None:
    table = Table(title="by tolerance: slowest / mean, GiB moved per layer, milliseconds of planning")
    for column in ("servers", "workload", *(f"{tolerance:g}" for tolerance in TOLERANCES)):
        table.add_column(column)
    for pool in pools:
        cells = [
            f"{made['slowest_over_mean']:.4f}, {made['moved_gib_per_layer']:.2f}, {made['plan_ms']:.1f}"
            for made in pool["by_tolerance"]
        ]
        table.add_row(str(pool["servers"]), pool["workload"], *cells)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
