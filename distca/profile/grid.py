"""The CA-tasks that are measured, how many of them make a full batch, and how often it is timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from distca.plan import AttentionShape, analytic_cost
from distca.plan.cost.analytic import AnalyticCost

# Offsets of 32 bits reach this many elements; padded buffers inside kernels count.
_MOST_ELEMENTS = 2**31
# Copies of a row that forward and backward hold at once: q, dO, o, dQ, dQ in float32; k,v, dK,dV twice, in float32.
_Q_COPIES, _KV_COPIES = 7, 6


@dataclass(frozen=True)
class Grid:
    """The points to measure.

    Attributes:
        q_rows: increasing query rows per task.
        kv_rows: increasing key/value rows per task.
        tile: rows of a kernel's tile. Tasks that are whole documents (q = kv) get lengths spread over one tile around
            the point. So unfilled tiles count as they do in real batches. Shards end at tile borders.
        fill_s: a batch takes at least about this long, by the analytic model.
        tasks: least tasks of a batch, as long as it takes less than four times ``fill_s``.
        longest_s: points whose single task takes longer, by the analytic model, are not measured.
        sample_s: time that the timed runs of a point should take together, by the analytic model.
        warm_up_s: seconds of load before anything is timed.
        tiles: forward is not measured where the batch has fewer query tiles: the last wave would decide.
        most_q_rows: query rows that a batch may have, each task rounded up by a tile.
        most_kv_rows: key/value rows that a batch may have.
        smooth_octaves: how far, in powers of two of rows, neighbouring points are averaged; 0 where they have no noise.
        most_rounds: how often a point is timed at most; 3 times at least.
        mixed_rounds: how often every mixed batch is timed.
        window: keys that a query sees; 0 for all. Points whose tasks have more keys than queries see are measured once.
    """

    q_rows: tuple[int, ...]
    kv_rows: tuple[int, ...]
    tile: int
    fill_s: float
    tasks: int
    longest_s: float
    sample_s: float
    warm_up_s: float
    tiles: int
    most_q_rows: int
    most_kv_rows: int
    smooth_octaves: float = 0.0
    most_rounds: int = 8
    mixed_rounds: int = 5
    window: int = 0

    def base(self, shape: AttentionShape) -> AnalyticCost:
        """The analytic model of what is measured."""
        heads = shape.heads, shape.kv_heads, shape.head_dim
        cost = analytic_cost(*heads, value_bytes=shape.value_bytes, block=self.tile, value_dim=shape.value_dim)
        return replace(cost, window=self.window)

    def seen(self, q_rows: int) -> int:
        """Keys that so many queries see at most."""
        return q_rows + self.window - 1 if self.window else self.kv_rows[-1]


@dataclass(frozen=True)
class Point:
    """One point of the grid and the batch that stands for it.

    Attributes:
        at: row and column in the table.
        q_rows: [N] query rows of the batch's tasks.
        kv_rows: [N] key/value rows of the batch's tasks.
        forward_full: whether the batch has enough query tiles for forward.
        rounds: timed runs.
    """

    at: tuple[int, int]
    q_rows: np.ndarray
    kv_rows: np.ndarray
    forward_full: bool
    rounds: int


def grid_for(device: torch.device, shape: AttentionShape) -> Grid:
    """The grid of a GPU, as large as its memory allows, or one that takes a CPU a few minutes."""
    if device.type != "cuda":
        return _cpu_grid()
    free, _ = torch.cuda.mem_get_info(device)
    most_kv_rows = min(
        _MOST_ELEMENTS // (shape.kv_bytes // shape.value_bytes), int(0.4 * free / _KV_COPIES / shape.kv_bytes)
    )
    steps = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384, 32768, 65536, 131072)
    return Grid(
        q_rows=steps,
        kv_rows=tuple(each for each in (*steps, 262144) if each <= most_kv_rows),  # a table needs a point for each
        tile=128,
        fill_s=6e-3,
        tasks=8,
        longest_s=0.25,
        sample_s=90e-3,
        warm_up_s=2.0,
        tiles=6 * torch.cuda.get_device_properties(device).multi_processor_count,
        most_q_rows=min(
            _MOST_ELEMENTS // (shape.q_bytes // shape.value_bytes), int(0.4 * free / _Q_COPIES / shape.q_bytes)
        ),
        most_kv_rows=most_kv_rows,
        smooth_octaves=1.0,
    )


def _cpu_grid() -> Grid:
    """Seconds of the analytic model are an H200's: one core takes tens of thousands of times as long, so that a batch
    of ``fill_s`` takes it some 20 ms. Single runs differ by 10 to 20 % on a machine that does other things too, hence
    many rounds."""
    steps = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    return Grid(
        q_rows=steps,
        kv_rows=steps,
        tile=16,
        fill_s=0.5e-6,
        tasks=8,
        longest_s=40e-6,
        sample_s=60e-6,
        warm_up_s=0.0,
        tiles=1,
        most_q_rows=8192,
        most_kv_rows=8192,
        smooth_octaves=1.0,
        most_rounds=24,
        mixed_rounds=15,
    )


def points(grid: Grid, shape: AttentionShape) -> list[Point]:
    """The points that are measured, with their batches."""
    return list(_points(grid, shape))


def _points(grid: Grid, shape: AttentionShape) -> Iterator[Point]:
    cost = grid.base(shape)
    generator = np.random.default_rng(0)
    for row, q in enumerate(grid.q_rows):
        for column, kv in enumerate(grid.kv_rows):
            one = float(cost.forward(np.array(q), np.array(kv)))
            tasks = _tasks(grid, shape, q, kv, one)
            beyond = column > 0 and grid.kv_rows[column - 1] >= grid.seen(q)
            if q > kv or beyond or tasks == 0 or one > grid.longest_s:
                continue
            q_rows, kv_rows = np.full(tasks, q), np.full(tasks, kv)
            if q == kv and tasks > 1:
                half = min(grid.tile, q) // 2
                q_rows = kv_rows = q - half + generator.permutation(tasks) * 2 * half // tasks
            batch = one * tasks
            yield Point(
                (row, column),
                q_rows,
                kv_rows,
                tasks * shape.heads * -(-q // grid.tile) >= grid.tiles,
                rounds=min(max(round(grid.sample_s / batch), 3), grid.most_rounds) if grid.fill_s else 5,
            )


def _tasks(grid: Grid, shape: AttentionShape, q: int, kv: int, one: float) -> int:
    """Tasks of q and kv rows that make a full batch; 0 where memory does not hold one."""
    fill = -(-grid.fill_s // one)
    at_least = min(grid.tasks, max(-(-4 * grid.fill_s // one), 1)) if grid.fill_s else grid.tasks
    tiles = -(-grid.tiles // (shape.heads * -(-q // grid.tile)))
    held = min(grid.most_q_rows // (q + grid.tile), grid.most_kv_rows // min(kv, grid.seen(q)))
    return int(min(max(fill, at_least, tiles), held))
