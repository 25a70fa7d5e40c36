"""Mixed batches, as servers run them: what the table is fitted to last, and others that check its predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distca.plan import CostModel
from distca.plan.cost.table import LoadFactors
from distca.profile.calibration import Tasks, load_factors
from distca.profile.grid import Grid
from distca.profile.timing import TimedServer
from distca.runtime.device_routes import ServerRoute


@dataclass(frozen=True)
class MixedBatch:
    """One batch and its seconds, the median of its rounds.

    Attributes:
        tasks: [N] query rows and [N] key/value rows.
        forward: seconds.
        backward: seconds.
    """

    tasks: Tasks
    forward: float
    backward: float


def random_batch(grid: Grid, cost: CostModel, seconds: float, seed: int) -> Tasks:
    """A batch such as planned servers get, in random order, until forward takes ``seconds`` or memory is full.

    First comes one long task, up to three quarters of the batch: a document of 4K rows or more on a GPU, or its
    last rows. The others, none longer and none above a quarter of the batch, are half whole documents and half shards.
    So some batches consist of short documents only, and most of the time of others is one shard of a long document.

    Returns:
        [N] query rows and [N] key/value rows.
    """
    generator = np.random.default_rng(seed)
    smallest = grid.kv_rows[0]
    most = min(grid.kv_rows[-1], grid.most_kv_rows)
    longest = 2 ** generator.uniform(np.log2(min(64 * smallest, grid.q_rows[-1], most)), np.log2(most))
    tasks = [_long_task(grid, cost, int(longest), seconds * generator.uniform(0.1, 0.75))]
    q_left, kv_left = grid.most_q_rows - tasks[0][0] - grid.tile, grid.most_kv_rows - tasks[0][1]
    left = seconds - _forward(cost, *tasks[0])
    least = min(grid.tile, smallest) + grid.tile
    for _ in range(4096):
        if q_left < least or kv_left < smallest:
            break  # no task has fewer rows
        kv = int(2 ** generator.uniform(np.log2(smallest), np.log2(longest)))
        q = kv
        if generator.random() < 0.5:
            tiles = max(int(2 ** generator.uniform(0, np.log2(max(kv / grid.tile, 1)))), 1)
            kv = max(kv // grid.tile * grid.tile, smallest)
            q = min(tiles * grid.tile, kv)
        took = _forward(cost, q, kv)
        if took > seconds / 4 or q + grid.tile > q_left or kv > kv_left:
            continue
        tasks.append((q, kv))
        q_left, kv_left, left = q_left - q - grid.tile, kv_left - kv, left - took
        if left <= 0:
            break
    q_rows, kv_rows = generator.permutation(np.array(tasks, np.int64)).T
    return q_rows, kv_rows


def _long_task(grid: Grid, cost: CostModel, kv: int, seconds: float) -> tuple[int, int]:
    """The whole document of ``kv`` rows, or as many of its last tiles as take ``seconds``, at least one."""
    if _forward(cost, kv, kv) <= seconds and kv + grid.tile <= grid.most_q_rows:
        return kv, kv
    kv = max(kv // grid.tile, 1) * grid.tile
    q_rows = np.arange(grid.tile, min(kv, grid.most_q_rows - grid.tile) + 1, grid.tile)
    fitting = np.flatnonzero(cost.forward(q_rows, np.full_like(q_rows, kv)) <= seconds)
    return int(q_rows[fitting[-1]] if len(fitting) else q_rows[0]), kv


def _forward(cost: CostModel, q_rows: int, kv_rows: int) -> float:
    return float(cost.forward(np.array([q_rows]), np.array([kv_rows]))[0])


def time_mixed(
    server: TimedServer,
    route: Callable[[np.ndarray, np.ndarray], ServerRoute],
    grid: Grid,
    drawn: Sequence[Tasks],
    advance: Callable[[], None],
) -> list[MixedBatch]:
    """Time all batches together, ``grid.mixed_rounds`` times."""
    routes = [route(*tasks) for tasks in drawn]
    taken = server.samples(routes, [grid.mixed_rounds] * len(routes), warm_up_s=grid.warm_up_s, advance=advance)
    return [
        MixedBatch(tasks, took.median("forward"), took.median("backward"))
        for tasks, took in zip(drawn, taken, strict=True)
    ]


def calibrated(cost: CostModel, batches: Sequence[MixedBatch]) -> LoadFactors:
    """The load factors that fit these batches."""
    forward, backward = np.array([(batch.forward, batch.backward) for batch in batches]).T
    return load_factors(cost, [batch.tasks for batch in batches], forward, backward)


def validation_of(cost: CostModel, batches: Sequence[MixedBatch]) -> dict[str, Any]:
    """Predicted against measured seconds of batches that were not fitted to.

    Returns:
        ``batches``: tasks, predicted and measured seconds of each; ``forward_error`` and ``backward_error``: worst and
        mean of |predicted / measured - 1|.
    """
    rows = [
        {
            "tasks": len(batch.tasks[0]),
            "forward_predicted_s": float(cost.forward(*batch.tasks).sum()),
            "forward_measured_s": batch.forward,
            "backward_predicted_s": float(cost.backward(*batch.tasks).sum()),
            "backward_measured_s": batch.backward,
        }
        for batch in batches
    ]
    report: dict[str, Any] = {"batches": rows}
    for direction in ("forward", "backward"):
        off = [abs(row[f"{direction}_predicted_s"] / row[f"{direction}_measured_s"] - 1) for row in rows]
        report[f"{direction}_error"] = {"worst": max(off), "mean": float(np.mean(off))}
    return report
