"""The simulator against every kept run: fits a few constants to two thirds of the files, checks all.

    python -m benchmarks.calibration --output benchmarks/results/calibration.json

A third of the files, chosen by a hash of their names, is held out of the fit. Constants and where they come from go to
``distca/simulate/rates_h200.json``, unless ``--no-fit`` checks those that are there: then all files that came later are
held out too. Linear layers in FP8 are never fitted to: what they take is in the cost table.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, fields
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.calibration_runs import NOT_EXPRESSED, RESULTS, errors, kept_runs
from benchmarks.measured_runs import Run
from distca.simulate import Rates
from distca.simulate.rates import RATES, load_rates
from distca.versions import command_line, versions, write_report

_TRACES = "traces and kernel times of throughput_2_gpus_30_batches_pretrain_128k_fused"
# What is fitted begins here and is held there: by so much, as a standard deviation of its logarithm, it may differ.
_PRIOR = {
    "linear_factor": (1.0, 0.02, f"{_TRACES}: products take 0.98 and 1.00 of the table's and the output layer's time"),
    "attention_factor": (1.0, 0.02, f"{_TRACES}: attention takes 1.00 and 1.01 of the table's time"),
    "elementwise_s": (1.4e-11, 0.2, f"{_TRACES}: all other kernels of a step take 0.175 and 0.179 s"),
    "rotation_s": (1e-11, 0.5, "some 36 bytes read and written per element at 3.5 TB/s"),
    "copy_bytes_per_s": (2.5e12, 0.3, "each byte read and written once at 3.5 TB/s and more for small pieces"),
    "optimizer_s": (1.5e-11, 0.3, "Adam reads and writes some 40 bytes per parameter at 3.5 TB/s"),
    "parameter_s": (4e-12, 0.3, "gradients are cleared, scaled and measured: 16 bytes at 3.5 TB/s"),
    "step_s": (1e-2, 0.5, "host time around a step"),
    "phase_s": (2e-3, 0.5, "host time around a micro-batch's forward or backward"),
}
_ALONE = {
    "head_s": (
        float(f"{0.319 / (65_536 * 4096 * 128_256):.4g}"),
        "319 ms for 65,536 rows, 4,096 wide, vocabulary 128,256 (benchmarks/results/home_compute.json)",
    ),
    "expert_layer_s": (
        4.7e-3,
        "steps of DistCA and context parallelism with EP 2 and 4, by the median over batches, are met within 3 %: "
        "benchmarks/results/experts_a3b_cut_2_gpus.json and experts_a3b_cut_4_gpus.json",
    ),
}
"""Constants that are not fitted, and where they were measured."""
_RUN_ERROR = 0.015  # two runs of one kind on other GPUs differ by about as much
_ROUNDS = 3  # of Gauss-Newton
_APART = 0.03  # modes that measured differ by less have no order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--no-fit", action="store_true", help="check the constants that are there")
    arguments = parser.parse_args()
    runs = kept_runs()
    rates = load_rates()
    if not arguments.no_fit:
        known = [run for run in runs if not run.held_out and run.job.fp8 == "none"]
        rates = fit(known)
        write_rates(rates, known)
    report = checked(runs, rates, json.loads(RATES.read_text())["fitted_to"])
    write_report(arguments.output, report)
    show(report)


def fit(runs: list[Run]) -> Rates:
    """Least squares of the runs' relative errors and of the constants' distance from where they begin, by
    Gauss-Newton in the constants' logarithms."""
    names = list(_PRIOR)
    start = np.log([_PRIOR[name][0] for name in names])
    width = np.array([_PRIOR[name][1] for name in names])
    at = start.copy()

    def residuals(point: np.ndarray) -> np.ndarray:
        return np.log1p(errors(runs, _rates(names, point))) / _RUN_ERROR

    for _ in track(range(_ROUNDS), description="Fitting"):
        here, step = residuals(at), 0.02
        slopes = np.stack([(residuals(at + step * each) - here) / step for each in np.eye(len(names))], axis=1)
        system = np.concatenate((slopes, np.diag(1 / width)))
        wanted = np.concatenate((-here, (start - at) / width))
        at = at + np.linalg.lstsq(system, wanted, rcond=None)[0]
    return _rates(names, at)


def _rates(names: list[str], logarithms: np.ndarray) -> Rates:
    values = {name: float(f"{math.exp(value):.4g}") for name, value in zip(names, logarithms, strict=True)}
    return Rates(**{name: value for name, (value, _) in _ALONE.items()}, **values)


def write_rates(rates: Rates, runs: list[Run]) -> None:
    """Write the constants with their sources, fitted to these runs."""
    fitted = sorted({run.file for run in runs})
    sources = {name: f"fitted, from {start:g}: {why}" for name, (start, _, why) in _PRIOR.items()}
    sources |= {name: source for name, (_, source) in _ALONE.items()}
    content = {
        "device": "NVIDIA H200",
        "command": "python -m benchmarks.calibration",
        "rates": {
            field.name: {"value": getattr(rates, field.name), "source": sources[field.name]} for field in fields(Rates)
        },
        "fitted_to": fitted,
    }
    write_report(RATES, content)


def checked(runs: list[Run], rates: Rates, fitted: list[str]) -> dict[str, Any]:
    """Predicted against measured for every run; the constants were ``fitted`` to these files."""
    rows = []
    for run in track(runs, description="Predicting"):
        predicted = run.predicted(rates)
        seconds = sum(each.step_s for each in predicted)
        row = {
            "run": run.name,
            "file": run.file,
            "workload": run.workload,
            "mode": run.mode.name,
            "held_out": run.file not in fitted or run.job.fp8 != "none",
            "measured_s": run.seconds,
            "predicted_s": seconds,
            "error": seconds / run.seconds - 1,
            "idle_measured": run.idle,
            "idle_predicted": float(np.mean([each.idle_share for each in predicted])),
            "memory_gib_measured": run.memory_gib,
            "memory_gib_predicted": max(float(each.memory_bytes.max()) for each in predicted) / 2**30,
        }
        if run.step_seconds:
            pairs = zip(predicted, run.step_seconds, strict=True)
            row["worst_step_error"] = max((each.step_s / took - 1 for each, took in pairs), key=abs)
        rows.append(row)
    orders = _orders(rows)
    return {
        "command": command_line("python -m benchmarks.calibration"),
        "versions": versions(),
        "rates": asdict(rates),
        "left_out": {name: why for name, why in NOT_EXPRESSED.items() if (RESULTS / name).exists()},
        "fitted": _summary([row for row in rows if not row["held_out"]]),
        "held_out": _summary([row for row in rows if row["held_out"]]),
        "orders": {"pairs": len(orders), "right": sum(right for _, right in orders)},
        "orders_wrong": [pair for pair, right in orders if not right],
        "runs": rows,
    }


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    sizes = np.abs([row["error"] for row in rows])
    return {
        "files": len({row["file"] for row in rows}),
        "runs": len(rows),
        "median_error": float(np.median(sizes)),
        "worst_error": float(sizes.max()),
        "worst": rows[int(sizes.argmax())]["run"],
    }


def _orders(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """Pairs of modes of one workload whose measured times differ by more than 3 %, and whether predictions agree."""
    found = []
    for _, group in groupby(rows, key=lambda row: (row["file"], row["workload"])):
        speeds = [(row["mode"], row["measured_s"], row["predicted_s"], row["run"]) for row in group]
        for (_, a, pa, run), (other, b, pb, _) in combinations(speeds, 2):
            if abs(a / b - 1) > _APART:
                found.append((f"{run} against {other}", (a > b) == (pa > pb)))
    return found


def show(report: dict[str, Any]) -> None:
    table = Table(title="Predicted against measured seconds")
    for column in ("run", "held out", "measured s", "predicted s", "error", "idle", "predicted", "GiB", "predicted"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for row in report["runs"]:
        idle, memory = row["idle_measured"], row["memory_gib_measured"]
        table.add_row(
            row["run"],
            "yes" if row["held_out"] else "",
            f"{row['measured_s']:.2f}",
            f"{row['predicted_s']:.2f}",
            f"{row['error']:+.1%}",
            "" if idle is None else f"{idle:.1%}",
            f"{row['idle_predicted']:.1%}",
            "" if memory is None else f"{memory:.1f}",
            f"{row['memory_gib_predicted']:.1f}",
        )
    console = Console(width=180)
    console.print(table)
    for name in ("fitted", "held_out"):
        each = report[name]
        console.print(
            f"{name}: {each['runs']} runs of {each['files']} files, median error {each['median_error']:.1%}, "
            f"worst {each['worst_error']:.1%} ({each['worst']})",
            highlight=False,
        )
    console.print(f"order of modes right in {report['orders']['right']} of {report['orders']['pairs']} pairs")


if __name__ == "__main__":
    main()
