"""Kernel time per CA-task inside a full batch of equal ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from distca.plan import AttentionShape, CostModel, TableCost
from distca.plan.cost.table import LoadFactors
from distca.profile.calibration import smoothed
from distca.profile.grid import Grid, Point
from distca.profile.timing import Samples, TimedServer
from distca.runtime.device_routes import ServerRoute


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
    base = grid.base(shape)
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
    _fill_beyond(grid, base, forward, backward)
    return Measured(forward, backward, noise_of(taken))


def _fill_beyond(grid: Grid, base: CostModel, forward: np.ndarray, backward: np.ndarray) -> None:
    """Tasks with more keys than their queries see cost what those with just enough do."""
    keys = np.array(grid.kv_rows)
    for row, q in enumerate(grid.q_rows):
        enough = int(np.searchsorted(keys, grid.seen(q)))
        for table, seconds in ((forward, base.forward), (backward, base.backward)):
            if enough + 1 < len(keys):
                expected = seconds(np.full_like(keys, q), keys)
                table[row, enough + 1 :] = table[row, enough] * expected[enough + 1 :] / expected[enough]


def noise_of(taken: Sequence[Samples]) -> dict[str, float]:
    """Relative standard deviation of a single run, median over the batches, forward and backward."""
    return {side: float(np.median([each.noise(side) for each in taken])) for side in ("forward", "backward")}


def smooth_points(grid: Grid, measured: Measured, shape: AttentionShape) -> Measured:
    """The same with less noise from point to point, as far as the grid asks for it."""
    base = grid.base(shape)
    axes = np.array(grid.q_rows, float), np.array(grid.kv_rows, float)
    rows = np.meshgrid(*axes, indexing="ij")
    octaves, least = grid.smooth_octaves, 2 * grid.tile
    forward = smoothed(measured.forward, base.forward(*rows), *axes, octaves, least)
    backward = smoothed(measured.backward, base.backward(*rows), *axes, octaves, least)
    return Measured(forward, backward, measured.noise)


def table_of(shape: AttentionShape, grid: Grid, measured: Measured, load: LoadFactors | None = None) -> TableCost:
    """The cost model of a measurement."""
    axes = np.array(grid.q_rows, float), np.array(grid.kv_rows, float)
    return TableCost(shape, *axes, measured.forward, measured.backward, block=grid.tile, load=load, window=grid.window)
