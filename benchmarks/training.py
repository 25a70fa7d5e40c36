"""Train the same batches with core attention disaggregation off and on, and compare tokens per second.

    python benchmarks/training.py --output benchmarks/results/training.json -- --config configs/llama-8b-cut.yaml

Everything behind ``--`` are settings of both runs. Unless they say otherwise, every document stays on one rank in both,
as stock megatron-core needs it, so both train on the same batches and their losses must agree. Ranks: one per GPU, or
four on CPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from distca.commands.versions import hardware, versions

ROOT = Path(__file__).resolve().parent.parent
MODES = {
    "off": ["--cad.enabled", "false"],
    "on": ["--cad.enabled", "true"],
    "on, resend": ["--cad.enabled", "true", "--cad.backward", "resend"],
    "on, one stream": ["--cad.enabled", "true", "--cad.ping_pong", "false"],
}


def main() -> None:
    arguments = _arguments()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="distca-benchmark-") as folder:
        for mode in arguments.modes:
            results[mode] = _run(mode, arguments, Path(folder))
        _keep_timeline(arguments, Path(folder))
    report = {
        "command": shlex.join(["python", "benchmarks/training.py", *sys.argv[1:]]),
        "hardware": hardware(arguments.ranks),
        "versions": versions(),
        "warm_up_steps": arguments.warm_up,
        "modes": results,
        "speed_up": {
            mode: results[mode]["tokens_per_s"]["mean"] / results["off"]["tokens_per_s"]["mean"]
            for mode in results
            if "off" in results and mode != "off"
        },
        "largest_loss_difference": _loss_difference(results),
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    _show(results)


def _arguments() -> argparse.Namespace:
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--ranks", type=int, default=gpus or 4)
    parser.add_argument("--warm-up", type=int, default=10, help="steps that compile and warm up, not counted")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["off", "on"])
    parser.add_argument("--timeline", type=Path, help="where to keep the Perfetto timeline of the last mode")
    parser.add_argument("settings", nargs="*", help="settings of pretrain_llama.py, after --")
    return parser.parse_args()


def _run(mode: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    name = mode.replace(", ", "-").replace(" ", "-")
    settings = ["--data.whole_documents", "true", *arguments.settings, *MODES[mode], "--name", name]
    settings += ["--output", str(folder), "--log.tensorboard", "false", "--checkpoint.save_at_end", "false"]
    command = ["torchrun", "--standalone", f"--nproc_per_node={arguments.ranks}", str(ROOT / "pretrain_llama.py")]
    # expandable segments: shapes differ from step to step, which fragments the allocator's fixed blocks
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": "1"} | os.environ
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    subprocess.run(command + settings, check=True, cwd=ROOT, env=environment)
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return _figures(lines, arguments.warm_up)


def _figures(lines: list[dict[str, Any]], warm_up: int) -> dict[str, Any]:
    counted = lines[warm_up:]
    figures: dict[str, Any] = {"steps": len(counted)}
    keys = ("tokens_per_s", "step_s", "mfu", "imbalance_before", "imbalance_after", "imbalance_measured")
    for key in (*keys, "bytes_moved", "plan_ms", "plan_wait_ms", "peak_memory_gb", "tokens"):
        column = [line[key] for line in counted if key in line]
        if column:
            spread = statistics.stdev(column) if len(column) > 1 else 0.0
            figures[key] = {"mean": statistics.fmean(column), "stdev": spread, "max": max(column)}
    # Rates of single steps weigh short steps too much: tokens over time is what training takes.
    seconds = sum(line["step_s"] for line in counted)
    figures["tokens_per_s"]["mean"] = sum(line["tokens"] for line in counted) / seconds
    figures["losses"] = [line["loss"] for line in lines]
    return figures


def _loss_difference(results: dict[str, Any]) -> float:
    """Largest relative difference of a step's loss between any mode and the first."""
    first, *others = (mode["losses"] for mode in results.values())
    return max((abs(a - b) / abs(a) for other in others for a, b in zip(first, other, strict=True)), default=0.0)


def _keep_timeline(arguments: argparse.Namespace, folder: Path) -> None:
    if arguments.timeline is not None:
        timelines = sorted(folder.glob("*/timeline.json"), key=lambda path: path.stat().st_mtime)
        arguments.timeline.parent.mkdir(parents=True, exist_ok=True)
        arguments.timeline.write_bytes(timelines[-1].read_bytes())


def _show(results: dict[str, Any]) -> None:
    table = Table(title="core attention disaggregation")
    for column in ("mode", "tokens/s", "step s", "MFU", "measured imbalance", "peak GiB"):
        table.add_column(column)
    for mode, figures in results.items():
        cells = [mode, f"{figures['tokens_per_s']['mean']:,.0f}", f"{figures['step_s']['mean']:.3f}"]
        for key, text in (("mfu", "{:.1%}"), ("imbalance_measured", "{:.3f}"), ("peak_memory_gb", "{:.1f}")):
            cells.append(text.format(figures[key]["mean"]) if key in figures else "")
        table.add_row(*cells)
    Console().print(table)


if __name__ == "__main__":
    main()
