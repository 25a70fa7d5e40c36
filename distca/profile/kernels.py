"""Kernel time per CA-task inside a full batch, and how well their sum predicts mixed batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distca.plan import AttentionShape, CostModel, TableCost, analytic_cost
from distca.profile.grid import Grid, Point
from distca.profile.served import Samples, TimedServer
from distca.runtime.device_routes import ServerRoute

VALIDATION_ROUNDS = 5
"""How often every mixed batch is timed."""


@dataclass(frozen=True)
class Measured:
    """Seconds per task; nan where not measured. Array legend: Q, V points of the grid's axes.

    Attributes:
        forward: [Q, V].
        backward: [Q, V].
        noise: for forward and backward the relative standard deviation of a single run, median over the points.
    """

    forward: np.ndarray
    backward: np.ndarray
    noise: dict[str, float]


def measure_points(
    server: TimedServer,
    route: Callable[[np.ndarray, np.ndarray], ServerRoute],
    grid: Grid,
    wanted: Sequence[Point],
    shape: AttentionShape,
    advance: Callable[[], None],
) -> Measured:
    """Time every point's batch and divide by its tasks.

    Tasks of one batch differ by less than a tile; each counts by its share of the analytic seconds.
    """
    base = analytic_cost(shape.heads, shape.kv_heads, shape.head_dim, value_bytes=shape.value_bytes)
    batches = [route(point.q_rows, point.kv_rows) for point in wanted]
    taken = server.samples(batches, [point.rounds for point in wanted], warm_up_s=grid.warm_up_s, advance=advance)
    forward = np.full((len(grid.q_rows), len(grid.kv_rows)), np.nan)
    backward = forward.copy()
    for point, took in zip(wanted, taken, strict=True):
        at = np.array([grid.q_rows[point.at[0]]]), np.array([grid.kv_rows[point.at[1]]])
        if point.forward_full:
            share = base.forward(*at)[0] / base.forward(point.q_rows, point.kv_rows).sum()
            forward[point.at] = took.median("forward") * share
        share = base.backward(*at)[0] / base.backward(point.q_rows, point.kv_rows).sum()
        backward[point.at] = took.median("backward") * share
    return Measured(forward, backward, noise_of(taken))


def noise_of(taken: Sequence[Samples]) -> dict[str, float]:
    """Relative standard deviation of a single run, median over the batches, forward and backward."""
    return {side: float(np.median([each.noise(side) for each in taken])) for side in ("forward", "backward")}


def table_of(shape: AttentionShape, grid: Grid, measured: Measured, block: int) -> TableCost:
    """The cost model of a measurement."""
    axes = np.array(grid.q_rows, float), np.array(grid.kv_rows, float)
    return TableCost(shape, *axes, measured.forward, measured.backward, block=block)


def random_batch(grid: Grid, cost: CostModel, seconds: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """[N] query and key/value rows of a random mix: half whole documents, half shards, sizes spread over the grid's
    octaves, in random order, until forward takes ``seconds`` or memory is full."""
    generator = np.random.default_rng(seed)
    # No task takes more than a quarter of the batch: planned servers hold more than one document.
    smallest = grid.kv_rows[0]
    q_left, kv_left, left = grid.most_q_rows, grid.most_kv_rows, seconds
    tasks: list[tuple[int, int]] = []
    for _ in range(4096):
        kv = int(2 ** generator.uniform(np.log2(smallest), np.log2(grid.q_rows[-1])))
        q = kv
        if generator.random() < 0.5:
            tiles = max(int(2 ** generator.uniform(0, np.log2(max(kv / grid.tile, 1)))), 1)
            q, kv = min(tiles * grid.tile, kv), max(kv // grid.tile * grid.tile, grid.tile)
            q = min(q, kv)
        took = float(cost.forward(np.array([q]), np.array([kv]))[0])
        if took > seconds / 4 or q + grid.tile > q_left or kv > kv_left:
            continue
        tasks.append((q, kv))
        q_left, kv_left, left = q_left - q - grid.tile, kv_left - kv, left - took
        if left <= 0:
            break
    q_rows, kv_rows = np.array(tasks, np.int64).T
    return q_rows, kv_rows


def validate(
    server: TimedServer,
    route: Callable[[np.ndarray, np.ndarray], ServerRoute],
    grid: Grid,
    cost: CostModel,
    batches: int,
    seconds: float,
    advance: Callable[[], None],
) -> dict[str, Any]:
    """Predicted against measured seconds of random mixed batches.

    Returns:
        ``batches``: tasks, predicted and measured seconds of each; ``forward_error`` and ``backward_error``: worst and
        mean of |predicted / measured - 1|.
    """
    drawn = [random_batch(grid, cost, seconds, seed) for seed in range(batches)]
    taken = server.samples(
        [route(*rows) for rows in drawn], [VALIDATION_ROUNDS] * batches, warm_up_s=grid.warm_up_s, advance=advance
    )
    rows = [
        {
            "tasks": len(q_rows),
            "forward_predicted_s": float(cost.forward(q_rows, kv_rows).sum()),
            "forward_measured_s": took.median("forward"),
            "backward_predicted_s": float(cost.backward(q_rows, kv_rows).sum()),
            "backward_measured_s": took.median("backward"),
        }
        for (q_rows, kv_rows), took in zip(drawn, taken, strict=True)
    ]
    report: dict[str, Any] = {"batches": rows}
    for direction in ("forward", "backward"):
        off = [abs(row[f"{direction}_predicted_s"] / row[f"{direction}_measured_s"] - 1) for row in rows]
        report[f"{direction}_error"] = {"worst": max(off), "mean": float(np.mean(off))}
    return report
