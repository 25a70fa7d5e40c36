"""Figures of benchmarks/attention_balance.py: errors of predictions and imbalances of measured servers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.table import Table

from distca.log import console
from distca.plan import Direction, imbalance

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@dataclass
class Batch:
    """What one server of one plan computes.

    Attributes:
        case: which plan it belongs to: mix, seed, servers, half, order.
        q_rows, kv_rows: [N] of its CA-tasks, in the order of the fused batch.
        predicted: seconds, forward and backward.
        gpu: the rank that ran it.
        measured: seconds, forward and backward, median of the rounds.
        noise: relative standard deviation of a single round, forward and backward.
    """

    case: tuple[Any, ...]
    q_rows: np.ndarray
    kv_rows: np.ndarray
    predicted: dict[str, float]
    gpu: int = 0
    measured: dict[str, float] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)


def factor_of(batches: list[Batch], side: str) -> float:
    """How much longer a GPU takes than predicted, over all its batches."""
    predicted = sum(batch.predicted[side] for batch in batches)
    return sum(batch.measured[side] for batch in batches) / predicted if predicted else 1.0


def by_case(batches: list[Batch]) -> list[tuple[tuple[Any, ...], list[Batch]]]:
    cases: dict[tuple[Any, ...], list[Batch]] = {}
    for batch in batches:
        cases.setdefault(batch.case, []).append(batch)
    return list(cases.items())


def plain(case: tuple[Any, ...], batches: list[Batch]) -> dict[str, Any]:
    mix, seed, servers, half, order = case
    return {
        **{"mix": mix, "seed": seed, "servers": servers, "half": half, "order": order},
        "gpu": [batch.gpu for batch in batches],
        **{
            name: {side: [float(f"{getattr(batch, name)[side]:.5g}") for batch in batches] for side in DIRECTIONS}
            for name in ("predicted", "measured", "noise")
        },
    }


def _sides(batches: list[Batch], name: str) -> dict[str, np.ndarray]:
    """Forward, backward and their sum of every batch, [B] each."""
    forward, backward = (np.array([getattr(batch, name)[side] for batch in batches]) for side in DIRECTIONS)
    return {"forward": forward, "backward": backward, "both": forward + backward}


def groups_of(batches: list[Batch], factors: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Errors and imbalances of all seeds and halves of a mix, size and order together."""
    groups = []
    keys = list(dict.fromkeys((case[0], case[2], case[4]) for case, _ in by_case(batches)))
    for mix, servers, order in keys:
        same = [each for each in batches if (each.case[0], each.case[2], each.case[4]) == (mix, servers, order)]
        predicted, measured = _sides(same, "predicted"), _sides(same, "measured")
        on = {side: np.array([factors[batch.gpu][side] for batch in same]) for side in DIRECTIONS}
        alike: dict[str, np.ndarray] = {side: measured[side] / on[side] for side in DIRECTIONS}
        alike["both"] = alike["forward"] + alike["backward"]
        group: dict[str, Any] = {"mix": mix, "servers": servers, "order": order}
        for side in (*DIRECTIONS, "both"):
            off, off_alike = predicted[side] / measured[side] - 1, predicted[side] / alike[side] - 1
            group[side] = {
                "error_mean": float(off.mean()),
                "error_worst": float(np.abs(off).max()),
                "within_5_percent": float((np.abs(off) <= 0.05).mean()),
                "within_5_percent_of_gpu": float((np.abs(off_alike) <= 0.05).mean()),
                "seconds_total": float(measured[side].sum()),
                "imbalance_predicted_worst": max(_imbalances(same, predicted[side])),
                **_of_measured("imbalance_measured", _imbalances(same, measured[side])),
                **_of_measured("imbalance_measured_alike_gpus", _imbalances(same, alike[side])),
            }
            if side != "both":
                group[side]["noise_of_one_round"] = float(np.median([each.noise[side] for each in same]))
        groups.append(group)
    return groups


def _imbalances(batches: list[Batch], seconds: np.ndarray) -> list[float]:
    """Slowest over mean of every plan; servers without work count."""
    found = []
    for case in dict.fromkeys(batch.case for batch in batches):
        mine = seconds[[batch.case == case for batch in batches]]
        found.append(imbalance(np.append(mine, np.zeros(case[2] - len(mine)))))
    return found


def _of_measured(name: str, imbalances: list[float]) -> dict[str, float]:
    return {f"{name}_median": float(np.median(imbalances)), f"{name}_worst": max(imbalances)}


def show(groups: list[dict[str, Any]]) -> None:
    table = Table(title="attention servers: predicted against measured", title_justify="left")
    columns = ("mix", "servers", "order", "", "mean error", "worst", "within 5 %", "with the GPU's factor", "noise")
    for column in (*columns, "slowest / mean, predicted", "measured: median, worst", "on alike GPUs"):
        table.add_column(column)
    for group in groups:
        for side in (*DIRECTIONS, "both"):
            figures = group[side]
            table.add_row(
                *(str(group[name]) if side == "forward" else "" for name in ("mix", "servers", "order")),
                side,
                f"{figures['error_mean']:+.1%}",
                f"{figures['error_worst']:.1%}",
                f"{figures['within_5_percent']:.0%}",
                f"{figures['within_5_percent_of_gpu']:.0%}",
                f"{figures['noise_of_one_round']:.1%}" if side != "both" else "",
                f"{figures['imbalance_predicted_worst']:.3f}",
                f"{figures['imbalance_measured_median']:.3f}, {figures['imbalance_measured_worst']:.3f}",
                f"{figures['imbalance_measured_alike_gpus_median']:.3f}, "
                f"{figures['imbalance_measured_alike_gpus_worst']:.3f}",
            )
    console().print(table)
