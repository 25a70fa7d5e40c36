"""What leveling a pipeline's phases by time instead of by attention should win, by the cost model; needs no GPU.

    python benchmarks/pipeline_levels.py --output benchmarks/results/pipeline_levels.json

Plans one step of the long-context mixes, 8B shape with 8 layers and MLPs recomputed, 8 micro-batches of 128K tokens per
data-parallel rank, with cad.level attention and time. A phase is counted as long as its slowest rank's attention and
linear layers of one layer, as if ping and pong hid all that they could.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from distca.commands.versions import versions
from distca.data.mixes import Mix, sample_long_context
from distca.data.sampler import MicroBatch, Sampler
from distca.device.host_to_device import uploading
from distca.plan import training_tolerance
from distca.plan.cost.model import CostModel
from distca.plan.cost.table_file import find_table
from distca.train.config.cli import parse_run_config
from distca.train.config.schema import RunConfig
from distca.train.data.pipeline_inputs import PipelineInputs, plan_pipeline
from distca.train.data.plan_options import Planning
from distca.train.run.linear_cost import beside_attention
from distca.train.run.stage_layers import stage_layers

TOKENS, MICRO_BATCHES, SEED = 131_072, 8, 1234
POOLS = ((2, 1), (2, 2), (4, 1), (4, 2))
"""Stages, data-parallel ranks."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    output = parser.parse_args().output
    cost = find_table("NVIDIA H200", "flash4", 32, 8, 128)
    assert cost is not None, "shipped with the package"
    cases = [_case(cost, mix, stages, ranks) for stages, ranks in POOLS for mix in get_args(Mix)]
    report = {
        "command": shlex.join(["python", "benchmarks/pipeline_levels.py", *sys.argv[1:]]),
        "versions": versions(),
        "predicted": "by the measured cost table of an H200",
        "cases": cases,
    }
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    _show(cases)


def _case(cost: CostModel, mix: Mix, stages: int, ranks: int) -> dict[str, Any]:
    figures: dict[str, Any] = {"mix": mix, "stages": stages, "data_parallel": ranks}
    made = {level: _plan(cost, _config(stages, level), mix, ranks) for level in ("attention", "time")}
    beside = made["time"].seconds_beside
    for level, step in made.items():
        slowest = (step.seconds_after + beside).max(axis=1)
        figures[level] = {"layer_ms": 1e3 * float(slowest.sum()), "moved_gib_per_layer": step.bytes_moved / 2**30}
    return figures


def _config(stages: int, level: str) -> RunConfig:
    settings = {
        "config": "configs/llama-8b-cut.yaml",
        "model.layers": 8,
        "parallel.pp": stages,
        "data.tokens_per_rank": TOKENS,
        "train.recompute": "mlp",
        "cad.level": level,
    }
    return parse_run_config([word for name, value in settings.items() for word in (f"--{name}", str(value))])


def _plan(cost: CostModel, config: RunConfig, mix: Mix, ranks: int) -> PipelineInputs:
    planning = Planning(
        rank=0,
        ranks=ranks,
        stage=0,
        stages=config.parallel.pp,
        layers=stage_layers(config, config.model.vocabulary or 1),
        cost=cost,
        disaggregate=True,
        nano_batches=2,
        resend=True,
        tolerance=training_tolerance(config.parallel.pp * ranks),
        chunks=1,
        device=torch.device("cpu"),
        beside=beside_attention(config, cost, on_gpu=True),
    )
    with uploading(planning.device) as upload:
        return plan_pipeline(planning, _documents(mix, ranks), upload, {})


def _documents(mix: Mix, ranks: int) -> tuple[MicroBatch, ...]:
    tokens = 4 * MICRO_BATCHES * ranks * TOKENS
    lengths = sample_long_context(mix, tokens, TOKENS, SEED, full_share=0.3 if mix == "prolong" else 0.0)
    return Sampler(np.asarray(lengths), ranks, TOKENS, MICRO_BATCHES, SEED, whole=True).next()


def _show(cases: list[dict[str, Any]]) -> None:
    table = Table(title="predicted: phases leveled by time against by attention")
    for column in ("stages × data-parallel", "mix", "time of a layer in a step, ms", "less", "bytes moved"):
        table.add_column(column)
    for case in cases:
        one, two = case["attention"], case["time"]
        table.add_row(
            f"{case['stages']} × {case['data_parallel']}",
            case["mix"],
            f"{one['layer_ms']:,.0f} → {two['layer_ms']:,.0f}",
            f"{1 - two['layer_ms'] / one['layer_ms']:.1%}",
            f"{two['moved_gib_per_layer'] / one['moved_gib_per_layer']:.2f}×",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
