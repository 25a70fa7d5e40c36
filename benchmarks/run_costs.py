"""Seconds of a model's core attention and matrix products for predicted runs: from the table that was measured on the
GPU, or else from the nearest one, which is always said."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from distca.errors import ConfigError
from distca.models.shape import ModelShape
from distca.plan import AttentionShape, CostModel, TableCost, analytic_cost
from distca.plan.cost.linear import LinearRate
from distca.plan.cost.table_file import TABLES, find_table, load_table
from distca.simulate.model import heads_of_rank

GPUS = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
"""GPUs that this project has tables of, by the names that torch.cuda.get_device_name() gives."""

_NARROW_VALUES = {"forward": 0.87, "backward": 1.22}
"""The time of the kernel for keys of 192 and values of 128 over that of one for both of 128 with as many FLOPs: kernels
traced in benchmarks/results/experts_moonlight_cut_2_gpus.json, over the H200's table."""


@dataclass(frozen=True)
class RunCosts:
    """The costs of a model's layers.

    Attributes:
        full: of layers without a window, with the rate of matrix products.
        windows: by window, where a table has them.
        notes: what was not measured on this GPU for these heads, in sentences.
    """

    full: CostModel
    windows: dict[int, CostModel] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def costs_of(gpu: str, model: ModelShape, tp: int, fp8: str = "none", table_of: str = "") -> RunCosts:
    """The costs of a model on one of ``tp`` tensor-parallel ranks.

    Args:
        gpu: one of :data:`GPUS`.
        model: its shape.
        tp: tensor-parallel ranks.
        fp8: how linear layers scale tensors to FP8, or "none".
        table_of: the GPU whose tables stand in for those that ``gpu`` lacks; empty for none.

    Raises:
        ConfigError: a GPU has no tables, or a table is missing that another GPU has and nobody asked for.
        SimulationError: ``tp`` does not divide the heads.
    """
    for name in filter(None, (gpu, table_of)):
        if name not in GPUS:
            raise ConfigError(f"The GPU is {name!r}, and there are cost tables of {' and '.join(GPUS)} alone.")
    shape, notes = heads_of_rank(model, tp), list[str]()
    tables = {window: _table(gpu, shape, window, table_of, notes) for window in dict.fromkeys((0, *model.windows))}
    full = tables.pop(0)
    assert full is not None
    linear = _linear(gpu, shape, fp8, table_of, notes)
    if linear is not full.linear:
        full = _remade(full, shape, linear)
    return RunCosts(full, {window: table for window, table in tables.items() if table is not None}, tuple(notes))


@cache
def shipped_table(gpu: str, shape: AttentionShape, window: int = 0) -> TableCost | None:
    """The table of this project for a kind of GPU, these heads and this window; None where there is none."""
    sizes = shape.heads, shape.kv_heads, shape.head_dim
    return find_table(gpu, "flash4", *sizes, window=window, value_dim=shape.value_dim)


def _table(gpu: str, shape: AttentionShape, window: int, table_of: str, notes: list[str]) -> TableCost | None:
    """None for a window that is modelled from layers without one."""
    if (own := shipped_table(gpu, shape, window)) is not None:
        return own
    what = _heads(shape) + (f" with a window of {window:,}" if window else "")
    others = {name: found for name in GPUS if (found := shipped_table(name, shape, window)) is not None}
    if table_of in others:
        notes.append(f"{gpu} has no cost table for {what}: that of {table_of} stands in for it.")
        return others[table_of]
    if others:
        raise ConfigError(
            f"There is no cost table of {gpu} for {what}. Give --table-of '{next(iter(others))}', whose table then "
            "stands in for it, or measure one with `distca profile`."
        )
    near = _nearest([gpu, *filter(None, [table_of])], shape, window)
    if near is None:
        notes.append(f"There is no cost table for {what}: windows are modelled.")
        return None
    notes.append(
        f"There is no cost table for {what}: that of {near.gpu} for {_heads(near.table.shape)} is scaled to it."
    )
    return _remade(near.table, shape, near.table.linear)


class _Near(NamedTuple):
    gpu: str
    table: TableCost


def _nearest(gpus: Sequence[str], shape: AttentionShape, window: int = 0) -> _Near | None:
    """The table of the nearest head size, of the first GPU that has it; of several with the nearest width of all
    heads."""

    def apart(near: _Near) -> tuple[float, int, float]:
        size, heads = (math.log(_width(near.table.shape, by) / _width(shape, by)) for by in (False, True))
        return abs(size), gpus.index(near.gpu), abs(heads)

    fitting = [_Near(gpu, table) for gpu in gpus for table in _tables_of(gpu) if table.window == window]
    return min(fitting, key=apart, default=None)


def _width(shape: AttentionShape, by_heads: bool) -> float:
    """Numbers in a head's key and value, or in those of all query heads."""
    return (shape.head_dim + (shape.value_dim or shape.head_dim)) * (shape.heads if by_heads else 1)


@cache
def _tables_of(gpu: str) -> list[TableCost]:
    short = gpu.lower().removeprefix("nvidia ").replace(" ", "-")
    return [load_table(path) for path in sorted(TABLES.glob(f"{short}_flash4_*.json"))]


def _remade(table: TableCost, shape: AttentionShape, linear: LinearRate | None) -> TableCost:
    """A table for other heads: what the analytic model says of both is a factor on what was measured."""
    columns, old = table.measured, table.shape
    rows = np.meshgrid(columns["q_rows"], columns["kv_rows"], indexing="ij")
    new_model, model = (
        replace(
            analytic_cost(of.heads, of.kv_heads, of.head_dim, block=table.block, value_dim=of.value_dim),
            window=table.window,
        )
        for of in (shape, old)
    )
    narrower = bool(shape.value_dim) and not old.value_dim
    seconds = {
        way: columns[f"{way}_seconds"]
        * (getattr(new_model, way)(*rows) / getattr(model, way)(*rows) * (factor if narrower else 1.0))
        for way, factor in _NARROW_VALUES.items()
    }
    axes = columns["q_rows"], columns["kv_rows"]
    return TableCost(
        shape, *axes, seconds["forward"], seconds["backward"], table.block, table.load, linear, table.window
    )


def _linear(gpu: str, shape: AttentionShape, fp8: str, table_of: str, notes: list[str]) -> LinearRate:
    """The rate of matrix products, which is this GPU's own in any case."""
    near = _nearest([gpu], shape)
    table = shipped_table(gpu, shape) or (near and near.table)
    assert table is not None and table.linear is not None
    rate, stand_in = table.linear, shipped_table(table_of, shape) if table_of else None
    if rate.in_fp8(fp8) is None and stand_in is not None and stand_in.linear is not None:
        notes.append(f"What FP8 saves was not measured on {gpu}: that of {table_of} stands in for it.")
        rate = replace(rate, fp8=stand_in.linear.fp8)
    return rate


def _heads(shape: AttentionShape) -> str:
    size = f"{shape.head_dim} with values of {shape.value_dim}" if shape.value_dim else str(shape.head_dim)
    return f"{shape.heads} query heads and {shape.kv_heads} key/value heads of {size}"
