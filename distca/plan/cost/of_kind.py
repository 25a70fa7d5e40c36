"""Seconds of the kinds of attention layers for which nobody measured any."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from distca.plan.cost.analytic import AnalyticCost, analytic_cost
from distca.plan.cost.model import CostModel
from distca.plan.kinds import AttentionKind

_LONG = 32768
"""Tokens of the document by which a model of windows is scaled to a table."""
_WAYS = ("forward", "backward")


def cost_of_kind(kind: AttentionKind, cost: CostModel) -> CostModel:
    """Seconds per CA-task of a kind, from the ``cost`` of layers without a window. A model counts windows; beside a
    table it is scaled to what the table says of a long document."""
    if not kind.window:
        return cost
    if isinstance(cost, AnalyticCost):
        return replace(cost, window=kind.window)
    shape = cost.shape
    model = analytic_cost(shape.heads, shape.kv_heads, shape.head_dim, value_bytes=shape.value_bytes, block=cost.block)
    rows = np.array([_LONG])
    scale = [float(getattr(cost, way)(rows, rows)[0] / getattr(model, way)(rows, rows)[0]) for way in _WAYS]
    return replace(model.times(*scale), window=kind.window, linear=cost.linear)
