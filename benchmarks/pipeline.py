"""Pipelines: the same batches with 1F1B on packed documents ("off") and with ticks over one server pool ("on").

    python benchmarks/pipeline.py --output benchmarks/results/pipeline.json --pp 2 --contexts 131072 262144 \
        -- --config configs/llama-8b-cut.yaml --model.layers 8

Documents follow the long-context versions of the mixes and stay whole on a rank, as unmodified megatron-core needs it;
a micro-batch holds one context's tokens per data-parallel rank. Everything behind ``--`` are settings of all runs, such
as a configuration. All runs share one start of the ranks, so they pay once for it; the JSON is written after every run.

Per run it has tokens/s, losses, and attention seconds by rank and phase, planned and measured, with warm-up and drain.
It also has the share of a step in which the ranks' compute streams are idle, and peak memory per stage, predicted and
measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from distca.versions import command_line, header, write_report

if TYPE_CHECKING:
    from distca.train.config.schema import RunConfig

ROOT = Path(__file__).resolve().parent.parent
MODES = {"off": ["--cad.enabled", "false"], "on": ["--cad.enabled", "true"]}


def main() -> None:
    arguments = arguments_of()
    if "RANK" in os.environ:
        _work(arguments)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={arguments.ranks}"]
    # expandable segments: shapes differ from step to step, which fragments the allocator's fixed blocks
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": "1"} | os.environ
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory(prefix="distca-pipeline-") as folder:
        environment["DISTCA_BENCHMARK_FOLDER"] = str(arguments.keep or folder)
        subprocess.run([*command, __file__, *sys.argv[1:]], check=True, cwd=Path.cwd(), env=environment)
    _show(json.loads(arguments.output.read_text())["cases"])


def arguments_of(argv: list[str] | None = None, ranks: int | None = None) -> argparse.Namespace:
    """The arguments of a command line, by default this process's; ``ranks`` are those that it has where it names none,
    by default this machine's GPUs."""
    usual = ranks or torch.cuda.device_count() or 4
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--ranks", type=int, default=usual)
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks; the rest is data parallel")
    parser.add_argument("--contexts", type=int, nargs="+", default=[131_072])
    parser.add_argument("--mixes", nargs="+", choices=("pretrain", "prolong"), default=["pretrain", "prolong"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234], help="of the documents and their order")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=2, help="steps that do not count")
    parser.add_argument("--steps", type=int, default=3, help="steps that count; the last one is also recorded")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["off", "on"])
    parser.add_argument("--keep", type=Path, help="folder for the runs with their pictures and timelines")
    parser.add_argument("settings", nargs="*", help="settings of pretrain_llama.py, after --")
    return parser.parse_args(argv)


def _work(arguments: argparse.Namespace) -> None:
    """One rank: train every case in every mode."""
    from benchmarks.ranks import joined_world

    with joined_world() as world:
        report: dict[str, Any] = {
            **header(command_line("python benchmarks/pipeline.py"), world.size),
            "stages": arguments.pp,
            "tensor_parallel": arguments.tp,
            "data_parallel": world.size // arguments.pp // arguments.tp,
            "micro_batches": arguments.micro_batches,
            "warm_up_steps": arguments.warm_up,
            "cases": [],
        }
        for case in cases_of(arguments):
            report["cases"].append(case)
            for mode in arguments.modes:
                case["modes"][mode] = _train(arguments, world, case, mode)
                _compare(case)
                if world.rank == 0:
                    write_report(arguments.output, report)


def config_of(arguments: argparse.Namespace, case: dict[str, Any], mode: str, folder: Path) -> RunConfig:
    """The settings of one run, which keeps its files in ``folder``.

    Raises:
        ConfigError: they cannot be.
    """
    from distca.train.config.cli import parse_run_config
    from distca.train.config.validate import validate

    steps, mix, context, seed = arguments.warm_up + arguments.steps, case["mix"], case["context"], case["seed"]
    settings = {
        "name": f"{mix}-{context}-{seed}-{mode}",
        "output": folder,
        "parallel.pp": arguments.pp,
        "parallel.tp": arguments.tp,
        "data.source": "mix",
        "data.path": f"{mix}-long",
        "data.context_length": context,
        "data.tokens_per_rank": context,
        "data.whole_documents": "true",
        "data.validation_fraction": 0,
        "data.seed": seed,
        "train.micro_batches": arguments.micro_batches,
        "train.steps": steps,
        "optimizer.warmup_steps": 0,
        "checkpoint.save_at_end": "false",
        "log.tensorboard": "false",
        "log.memory": "true",
        "log.timeline_steps": f"[{steps},{steps}]",
    }
    line = [*arguments.settings, *(word for name, value in settings.items() for word in (f"--{name}", str(value)))]
    config = parse_run_config(line + MODES[mode])
    validate(config, arguments.ranks)
    return config


def cases_of(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The workloads of the run, without figures."""
    every = product(arguments.contexts, arguments.mixes, arguments.seeds)
    return [{"mix": mix, "context": context, "seed": seed, "modes": {}} for context, mix, seed in every]


def _train(arguments: argparse.Namespace, world: Any, case: dict[str, Any], mode: str) -> dict[str, Any]:
    """One run; every rank gets its figures. A run that is refused before it starts says why instead."""
    import torch.distributed as dist

    from distca.errors import ConfigError
    from distca.train.data.corpus import open_corpus
    from distca.train.run.main import run_on

    try:
        config = config_of(arguments, case, mode, Path(os.environ["DISTCA_BENCHMARK_FOLDER"]))
        run = run_on(world, config, open_corpus(config)).path
    except ConfigError as error:
        return {"refused": str(error)}
    gc.collect()
    torch.cuda.empty_cache()
    dist.barrier()
    return _figures(run, arguments.warm_up, arguments.pp)


def _figures(run: Path, warm_up: int, stages: int) -> dict[str, Any]:

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    counted = lines[warm_up:]
    idle = idle_shares(json.loads((run / "timeline.json").read_text())["traceEvents"])
    figures: dict[str, Any] = {
        # Rates of single steps weigh short steps too much: tokens over time is what training takes.
        "tokens_per_s": sum(line["tokens"] for line in counted) / sum(line["step_s"] for line in counted),
        "idle_share": {"mean": statistics.fmean(idle.values()), "by_rank": list(idle.values())},
        "attention": json.loads((run / "phases.json").read_text()),
        "losses": [line["loss"] for line in lines],
    }
    keys = ("step_s", "mfu", "imbalance_before", "imbalance_after", "imbalance_measured", "imbalance_phases")
    for key in keys:
        column = [line[key] for line in counted if key in line]
        if column:
            spread = statistics.stdev(column) if len(column) > 1 else 0.0
            figures[key] = {"mean": statistics.fmean(column), "stdev": spread, "max": max(column)}
    for name, key in (("measured", "peak_memory_gb_stage"), ("predicted", "predicted_memory_gb_stage")):
        figures[f"peak_memory_gb_{name}"] = [
            max(line[f"{key}_{stage}"] for line in counted) for stage in range(stages) if f"{key}_{stage}" in counted[0]
        ]
    return figures


def _compare(case: dict[str, Any]) -> None:
    off, on = (case["modes"].get(mode, {}) for mode in ("off", "on"))
    if "tokens_per_s" in off and "tokens_per_s" in on:
        case["speed_up"] = on["tokens_per_s"] / off["tokens_per_s"]
        pairs = zip(off["losses"], on["losses"], strict=True)
        case["largest_loss_difference"] = max(abs(a - b) / abs(a) for a, b in pairs)


def _show(cases: list[dict[str, Any]]) -> None:
    table = Table(title="ticks over one server pool (on) against 1F1B (off)")
    for column in (
        "mix",
        "context",
        "seed",
        "mode",
        "tokens/s",
        "idle",
        "attention, slowest/mean by phase",
        "peak GiB",
    ):
        table.add_column(column)
    for case in cases:
        for mode, figures in case["modes"].items():
            cells = [case["mix"], f"{case['context']:,}", str(case["seed"]), mode]
            if "refused" in figures:
                table.add_row(*cells, figures["refused"])
                continue
            level = _level(figures["attention"])
            peaks = ", ".join(f"{peak:.1f}" for peak in figures["peak_memory_gb_measured"])
            table.add_row(
                *cells, f"{figures['tokens_per_s']:,.0f}", f"{figures['idle_share']['mean']:.1%}", level, peaks
            )
        if "speed_up" in case:
            table.add_row("", "", "", "on / off", f"{case['speed_up']:.3f}×")
    Console().print(table)


def _level(attention: dict[str, Any]) -> str:
    """Measured and planned; where plans level linear layers too, with these."""
    texts = []
    for name in ("measured", "planned"):
        if name in attention:
            linear = attention[name].get("with_linear")
            texts.append(f"{name} {attention[name]['phases']:.3f}")
            texts[-1] += f", with linear layers {linear['phases']:.3f}" if linear else ""
    return "; ".join(texts)


def idle_shares(trace: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Share of a step in which each rank computed nothing of the model, from the trace of exactly that step.

    The step lasts from the first computation of any rank to the last one of any rank; the optimizer's step and the
    reduction of gradients lie after it. Computation is what the tracks "compute ping", "compute pong" and "stage" hold.
    Under ticks these spans leave out the waits for attention rows and also their packing. So idle is counted too high
    rather than too low there. A micro-batch's forward or backward under 1F1B is one span.

    Args:
        trace: events of a timeline.json.

    Returns:
        By rank, a share between 0 and 1; empty where nothing was recorded.
    """
    events = list(trace)
    tracks = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X" and tracks[event["pid"], event["tid"]] in ("compute ping", "compute pong", "stage"):
            spans.setdefault(event["pid"], []).append((event["ts"], event["ts"] + event["dur"]))
    if not spans:
        return {}
    begin = min(start for mine in spans.values() for start, _ in mine)
    end = max(stop for mine in spans.values() for _, stop in mine)
    return {rank: 1 - _covered(mine) / (end - begin) for rank, mine in sorted(spans.items())}


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union."""
    starts, stops = np.array(sorted(spans)).T
    reached = np.maximum.accumulate(stops)
    before = np.concatenate(([-np.inf], reached[:-1]))
    return float(np.maximum(reached - np.maximum(starts, before), 0).sum())


if __name__ == "__main__":
    main()
