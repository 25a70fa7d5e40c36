"""Servers without a model beside homes, simulated: what A100 or H20 GPUs bring to 64 H100 that train the 8B shape,
Qwen3-30B-A3B or Qwen3.5-9B.

    python -m benchmarks.simulated_servers --output benchmarks/results/simulated_servers.json
    python -m benchmarks.simulated_servers --model qwen3-30b-a3b --backward keep --output FILE
    python -m benchmarks.simulated_servers --model qwen3.5-9b --backward keep --output FILE

Every home is one H100 with 64K tokens of a micro-batch; nodes have 8 GPUs and 50 GB/s per GPU between them, those of
A100 25. Homes recompute all but core attention. Nothing was measured on A100 or H20: their cost tables are those of the
H100, which was measured, times the ratio of peak FLOP/s, and never faster than memory bandwidth allows
(``benchmarks.derived_gpus``). All other constants are the simulator's, fitted to H200s. Each comparison is of the same
batches with the homes alone; H100 servers are there to compare with. Servers keep rows for backward, or homes resend.
Planning is timed in CPU milliseconds of one core.

A3B's experts are on the 8 homes of a node. Homes wait for rows of experts, as in training where layers are recomputed
as wholes. Its 32 query heads have half as many key/value heads as those of the table that was measured, whose seconds
count for them too: the products are the same. So it is with 9B's 16 heads of 256. Of 9B's layers three in four are
gated delta nets, which stay on homes.
"""

from __future__ import annotations

import argparse
import logging
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
from rich.progress import track

from benchmarks.derived_gpus import GPUS, derived
from benchmarks.simulated_experts import EXPERT_RANKS
from benchmarks.throughput.batches import draw_batches
from benchmarks.throughput.settings import Cell
from distca.baselines import parse_mode
from distca.data.mixes import Mix
from distca.models.shape import ModelShape
from distca.plan import TableCost
from distca.plan.cost.pool import PoolCost
from distca.plan.cost.table_file import find_table
from distca.simulate import MODELS, Cluster, Job, Prediction, Workload, simulate
from distca.simulate.cad import planned
from distca.simulate.job import Backward
from distca.versions import command_line, versions, write_report

HOMES, TOKENS, SEED = 64, 65_536, 1234
DISTCA = parse_mode("distca")


def table_of(model: ModelShape) -> TableCost:
    """The H100's table for the model's heads, which was measured with 8 key/value heads."""
    measured = find_table("NVIDIA H100 80GB HBM3", "flash4", model.heads, 8, model.resolved_head_dim)
    assert isinstance(measured, TableCost)
    shape = replace(measured.shape, kv_heads=model.kv_heads)
    q_rows, kv_rows, forward, backward = measured.measured.values()
    rest = measured.block, measured.load, measured.linear
    return TableCost(shape, q_rows, kv_rows, forward, backward, *rest)


def job_of(model: str, servers: int, gpu: str) -> Job:
    """Homes, and so many servers of a kind of GPU."""
    shape = MODELS[model]
    table = table_of(shape)
    kind, home = GPUS[gpu], GPUS["H100"]
    cluster = Cluster(
        HOMES + servers, memory_gib=home.memory_gib, slow_gpus=servers, slow_network_gb_s=kind.network_gb_s
    )
    cost = PoolCost((table, derived(table, home, kind)), (0,) * HOMES + (1,) * servers) if servers else table
    return Job(
        shape,
        cluster,
        cost,
        ep=EXPERT_RANKS[0] if shape.experts.count else 1,
        tokens_per_rank=TOKENS,
        recompute="all",
        gradients="bfloat16",
        moments="bfloat16",
        extra_servers=servers,
        tolerance=0.02,
    )


def workloads(mix: Mix, context: int, steps: int) -> list[Workload]:
    """Global batches of one micro-batch, drawn and packed as the throughput benchmark does."""
    cell = Cell(mix, context * 1024)
    drawn = draw_batches(cell, steps, ranks=HOMES, tokens_per_rank=TOKENS, micro_batches=1, vocabulary=256, seed=SEED)
    return [Workload(each, drawn.bins) for each in drawn.global_batches]


def figures(job: Job, drawn: list[Workload]) -> dict[str, Any]:
    """Means over batches."""
    found: list[Prediction] = []
    levels, moved, ms = [], [], []
    assert job.non_attention is not None or not job.extra_servers  # a run counts it once, so no plan's time has it
    for workload in drawn:
        began = time.process_time()
        plan = planned(job, workload)
        ms.append((time.process_time() - began) * 1e3)
        balance = plan.balance()
        levels.append(balance.seconds_after + balance.other_seconds)
        moved.append(balance.bytes_moved)
        found.append(simulate(job, DISTCA, workload, plan=plan))
    homes, servers = slice(0, HOMES), slice(HOMES, None)
    times = np.sum(levels, axis=(0, 1)) / len(drawn)
    return {
        "step_s": float(np.mean([each.step_s for each in found])),
        "gb_moved_per_layer": float(np.mean(moved)) / 1e9,
        "gb_sent_by_the_busiest_per_layer": float(
            np.mean([each.sent_bytes.max() for each in found]) / job.model.layers / 1e9
        ),
        "attention_share_of_servers": float(
            np.mean([each.attention_s[servers].sum() / each.attention_s.sum() for each in found])
        ),
        "planned_layer_ms_slowest_home": float(times[homes].max() * 1e3),
        "planned_layer_ms_slowest_server": float(times[servers].max(initial=0.0) * 1e3),
        "busy_share_of_homes": float(np.mean([each.busy_s[homes].mean() / each.step_s for each in found])),
        "exposed_share_of_homes": float(np.mean([each.exposed_s[homes].mean() / each.step_s for each in found])),
        "memory_gib_home": float(max(each.memory_bytes[homes].max() for each in found) / 2**30),
        "memory_gib_server": float(max(each.memory_bytes[servers].max(initial=0.0) for each in found) / 2**30),
        "planning_ms": float(np.mean(ms)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--steps", type=int, default=2, help="global batches of a cell")
    parser.add_argument("--servers", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--gpus", nargs="+", default=["A100", "H20", "H100"], choices=list(GPUS))
    parser.add_argument("--model", default="8b", choices=["8b", "qwen3-30b-a3b", "qwen3.5-9b"])
    parser.add_argument("--backward", nargs="+", default=list(get_args(Backward)), choices=get_args(Backward))
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512], help="in K tokens")
    given = parser.parse_args()
    logging.getLogger("distca").setLevel(logging.ERROR)
    report: dict[str, Any] = {
        "command": command_line("python -m benchmarks.simulated_servers"),
        "versions": versions(),
        "simulated": True,
        "model": given.model,
        "homes": f"{HOMES} x H100, {TOKENS} tokens each",
        "tables": "A100 and H20 derived from the H100's by peak FLOP/s and memory bandwidth; none was measured",
        "gpus": {name: vars(GPUS[name]) for name in sorted({"H100", *given.gpus})},
        "steps": given.steps,
        "cells": [],
    }
    mixes: tuple[Mix, ...] = ("pretrain", "prolong")
    for mix, context in track(list(product(mixes, given.contexts)), description="Simulating"):
        drawn = workloads(mix, context, given.steps)
        alone = {way: figures(replace(job_of(given.model, 0, "H100"), backward=way), drawn) for way in given.backward}
        base = min(each["step_s"] for each in alone.values())
        for way, found in alone.items():
            report["cells"].append({"mix": mix, "context_k": context, "servers": 0, "backward": way} | found)
        for gpu, servers, way in product(given.gpus, given.servers, given.backward):
            found = figures(replace(job_of(given.model, servers, gpu), backward=way), drawn)
            cell = {"mix": mix, "context_k": context, "servers": servers, "gpu": gpu, "backward": way}
            report["cells"].append(cell | found | {"speed_up_over_homes_alone": base / found["step_s"]})
            write_report(given.output, report)


if __name__ == "__main__":
    main()
