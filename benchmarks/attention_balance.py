"""Does every attention server take the time that the planner predicts? Plans of real mixes, run and timed.

    distca profile --output table.json
    python benchmarks/attention_balance.py --table table.json --output benchmarks/results/attention_balance.json

Every rank is one attention server and runs its CA-tasks of each plan, forward and backward, on random rows, with the
functions that a training step runs; nothing is sent. All servers compute at once: one per GPU, or four on CPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from rich.table import Table

from distca.attention import choose_kernel
from distca.commands.versions import versions
from distca.data.mixes import Mix, sample_lengths
from distca.log import console
from distca.plan import (
    AttentionShape,
    CostModel,
    Plan,
    PlanError,
    TableCost,
    imbalance,
    load_table,
    plan_at_home,
    plan_micro_batch,
    route,
    server_seconds,
)
from distca.profile.served import TimedServer
from distca.profile.tables import find_table
from distca.runtime.device_routes import ServerRoute
from distca.testing.ranks import run_ranks

DIRECTIONS = ("forward", "backward")


def main() -> None:
    arguments = _arguments()
    gpus = torch.cuda.device_count() > 0
    cases = _cases(arguments, _cost(arguments))
    plans = [case.pop("plan") for case in cases]
    measured = run_ranks(arguments.ranks, _serve, plans, arguments.shape, arguments.repeats, timeout=900.0, gpus=gpus)
    for number, case in enumerate(cases):
        case["measured_s"] = {side: [rank[number][side] for rank in measured] for side in DIRECTIONS}
        case["imbalance_predicted"] = {side: imbalance(seconds) for side, seconds in _sides(case["predicted_s"])}
        case["imbalance_measured"] = {side: imbalance(seconds) for side, seconds in _sides(case["measured_s"])}
    report = {
        "command": shlex.join(["python", "benchmarks/attention_balance.py", *sys.argv[1:]]),
        "hardware": _hardware(arguments.ranks),
        "versions": versions(),
        "table": str(arguments.table or "the package's"),
        "tokens_per_server": arguments.tokens,
        "groups": _groups(cases),
        "cases": cases,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    _show(report["groups"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--table", type=Path, help="a cost table of `distca profile`; by default the package's")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 4)
    parser.add_argument("--mixes", nargs="+", choices=get_args(Mix), default=list(get_args(Mix)))
    parser.add_argument("--tokens", type=int, default=131_072, help="tokens per server")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each server's batch")
    parser.add_argument("--shape", type=int, nargs=3, default=[32, 8, 128], metavar=("HEADS", "KV_HEADS", "HEAD_DIM"))
    return parser.parse_args()


def _cost(arguments: argparse.Namespace) -> TableCost:
    heads, kv_heads, head_dim = arguments.shape
    if arguments.table is not None:
        cost = load_table(arguments.table)
        if (cost.shape.heads, cost.shape.kv_heads, cost.shape.head_dim) != (heads, kv_heads, head_dim):
            raise PlanError(f"{arguments.table} was measured with {cost.shape}, not with --shape {arguments.shape}.")
        return cost
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    found = find_table(device, _kernel(head_dim).name, heads, kv_heads, head_dim)
    if found is None:
        raise PlanError(
            f"There is no cost table of {device} with --shape {arguments.shape}: run `distca profile` first."
        )
    return found


def _kernel(head_dim: int) -> Any:
    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    return choose_kernel("auto", device=device, dtype=dtype, head_dim=head_dim)


def _cases(arguments: argparse.Namespace, cost: CostModel) -> list[dict[str, Any]]:
    """One entry per plan of a nano-batch: where it comes from, the plan, and predicted seconds per server."""
    cases = []
    for mix in arguments.mixes:
        for seed in range(arguments.seeds):
            lengths = sample_lengths(mix, arguments.tokens * arguments.ranks, seed)
            for nano_batches in (1, 2):
                made = plan_micro_batch(lengths, arguments.ranks, cost, nano_batches=nano_batches)
                about = {"mix": mix, "seed": seed, "nano_batches": nano_batches}
                for nano, planned in enumerate(made.nano_batches):
                    if nano_batches == 1:
                        at_home = plan_at_home(planned.layout)
                        cases.append({**about, "nano": nano, "placed": "at home", **_predicted(at_home, cost)})
                    cases.append({**about, "nano": nano, "placed": "planned", **_predicted(planned.forward, cost)})
    return cases


def _predicted(plan: Plan, cost: CostModel) -> dict[str, Any]:
    predicted = {
        "forward": server_seconds(plan, cost, "forward").tolist(),
        "backward": server_seconds(plan, cost, "backward").tolist(),
    }
    return {"plan": plan, "predicted_s": predicted}


def _serve(plans: list[Plan], shape: list[int], repeats: int) -> list[dict[str, float]]:
    """This rank's seconds as a server of every plan; runs on every rank."""
    warnings.simplefilter("ignore")  # kernels compiled at first use have much to say
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    dtype = torch.bfloat16 if gpu else torch.float32
    routes = [route(plan, dist.get_rank()) for plan in plans]
    most = {side: max(getattr(each, side).destination_rows for each in routes) for side in ("q", "kv")}
    server = TimedServer(
        _kernel(shape[2]),
        AttentionShape(*shape, value_bytes=dtype.itemsize),
        device,
        dtype,
        q_rows=most["q"],
        kv_rows=most["kv"],
    )
    time_one = partial(server.seconds, warm_up=1, repeats=repeats)
    time_one(ServerRoute.of(routes[0], device))  # compiles
    seconds = []
    for each in routes:
        dist.barrier()
        took = time_one(ServerRoute.of(each, device))
        seconds.append({"forward": took.forward, "backward": took.backward})
    return seconds


def _sides(seconds: dict[str, list[float]]) -> list[tuple[str, np.ndarray]]:
    """Forward, backward and their sum, [R] each."""
    both = [(side, np.array(seconds[side])) for side in DIRECTIONS]
    return [*both, ("both", both[0][1] + both[1][1])]


def _groups(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Errors and imbalances of all seeds of a mix, nano-batching and placement together."""
    keys = ("mix", "nano_batches", "placed")
    groups = []
    for key in sorted({tuple(case[name] for name in keys) for case in cases}):
        same = [case for case in cases if tuple(case[name] for name in keys) == key]
        group: dict[str, Any] = dict(zip(keys, key, strict=True))
        for side in (*DIRECTIONS, "both"):
            off = np.concatenate([_errors(case, side) for case in same])
            measured = [case["imbalance_measured"][side] for case in same]
            group[side] = {
                "error_mean": float(off.mean()),
                "error_worst": float(np.abs(off).max()),
                "within_5_percent": float((np.abs(off) <= 0.05).mean()),
                "imbalance_predicted_worst": max(case["imbalance_predicted"][side] for case in same),
                "imbalance_measured_median": float(np.median(measured)),
                "imbalance_measured_worst": max(measured),
            }
        groups.append(group)
    return groups


def _errors(case: dict[str, Any], side: str) -> np.ndarray:
    """[R] predicted / measured - 1 of every server that has work."""
    predicted, measured = dict(_sides(case["predicted_s"]))[side], dict(_sides(case["measured_s"]))[side]
    busy = predicted > 0
    return predicted[busy] / measured[busy] - 1


def _hardware(ranks: int) -> str:
    if torch.cuda.is_available():
        return f"{ranks} × {torch.cuda.get_device_name()}"
    return f"{ranks} ranks on {os.cpu_count()} cores, {platform.machine()}"


def _show(groups: list[dict[str, Any]]) -> None:
    table = Table(title="attention servers: predicted against measured", title_justify="left")
    for column in ("mix", "halves", "placed", "", "mean error", "worst", "within 5 %"):
        table.add_column(column)
    table.add_column("slowest / mean, predicted")
    table.add_column("measured: median, worst")
    for group in groups:
        for side in (*DIRECTIONS, "both"):
            figures = group[side]
            table.add_row(
                *(str(group[name]) if side == "forward" else "" for name in ("mix", "nano_batches", "placed")),
                side,
                f"{figures['error_mean']:+.1%}",
                f"{figures['error_worst']:.1%}",
                f"{figures['within_5_percent']:.0%}",
                f"{figures['imbalance_predicted_worst']:.3f}",
                f"{figures['imbalance_measured_median']:.3f}, {figures['imbalance_measured_worst']:.3f}",
            )
    console().print(table)


if __name__ == "__main__":
    main()
