"""Formulas for the seconds of attention tasks.

Planning uses them if it has no measured table. A measured table holds seconds, which planning divides by those of the
formula.

A *task* is the query range [kv_rows - q_rows, kv_rows) of a document. Each query sees all keys up to its own position,
or with a *window* of w keys the last w of these keys. A *pair* is a query and a key that the query sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from distca.plan.cost.linear import LinearRate
from distca.plan.cost.model import AttentionShape, CostModel, Direction
from distca.plan.cost.pool import PoolCost
from distca.plan.cost.scaled import ScaledCost
from distca.plan.geometry import causal_pairs, keys_seen, pairs
from distca.plan.kinds import AttentionKind

_LONG = 32768
""":func:`cost_of_kind` scales a formula to the seconds of a document of this many tokens, which keep a GPU busy."""

_WAYS = ("forward", "backward")


@dataclass(frozen=True)
class AnalyticCost(CostModel):
    """Seconds of a task are a · pairs + b · query rows + c · keys that any of its queries sees.

    Attributes:
        shape, block: heads, and query rows of one kernel tile.
        linear: seconds of matrix products of linear layers; None if unknown.
        forward_terms, backward_terms: a, b and c in forward and in backward, in seconds.
        window: the number of keys that a query sees; 0 without a limit. The formula counts ``block`` - 1 more keys, as
            a kernel computes whole tiles.
    """

    shape: AttentionShape
    block: int
    forward_terms: tuple[float, float, float]
    backward_terms: tuple[float, float, float]
    linear: LinearRate | None = None
    window: int = 0

    def times(self, forward: float, backward: float) -> AnalyticCost:
        a, b, c = self.forward_terms
        d, e, f = self.backward_terms
        return replace(
            self,
            forward_terms=(a * forward, b * forward, c * forward),
            backward_terms=(d * backward, e * backward, f * backward),
        )

    @cached_property
    def _terms(self) -> dict[Direction, np.ndarray]:
        both = np.array((self.forward_terms, self.backward_terms))
        return {"both": both, "forward": both[:1], "backward": both[1:]}

    def forward(self, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return self.per_direction("forward", q_rows, kv_rows)[0]

    def backward(self, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return self.per_direction("backward", q_rows, kv_rows)[0]

    def per_direction(self, direction: Direction, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        q = np.asarray(q_rows, np.float64)
        # A task without queries takes 0 seconds.
        kv = kv_rows * (q > 0)
        seen = self.window + self.block - 1
        pair, keys = (pairs(q, kv, seen), keys_seen(q, kv, seen)) if self.window else (causal_pairs(q, kv), kv)
        # A matrix product rounds differently on different CPUs, so ranks could make different plans.
        a, b, c = self._terms[direction].T.reshape(3, -1, *(1,) * q.ndim)
        return np.asarray(a * pair + b * q + c * keys)

    def of_few(self, direction: Direction, q_rows: Sequence[float], kv_rows: Sequence[float]) -> list[list[float]]:
        if self.window:
            return super().of_few(direction, q_rows, kv_rows)
        each = [(causal_pairs(q, kv), q, kv if q else 0) for q, kv in zip(q_rows, kv_rows, strict=True)]
        return [[a * pair + b * q + c * kv for pair, q, kv in each] for a, b, c in self._terms[direction].tolist()]


def analytic_cost(
    heads: int, kv_heads: int, head_dim: int, *, value_bytes: int = 2, block: int = 128, value_dim: int = 0
) -> AnalyticCost:
    """Returns a formula for flash-attn-4 on an H200, fitted by least squares and scaled to these heads. It
    also has seconds of linear layers, from the FLOP/s of their products in forward and in backward.

    The fit is for 32 query heads and 8 k,v heads of size 128. It is within 9 % of seven measured rates in forward, and
    within 6 % in backward (benchmarks/results/planner.md). ``block`` is the query rows of one kernel tile. The other
    arguments are those of :class:`AttentionShape`."""
    shape = AttentionShape(heads, kv_heads, head_dim, value_bytes, value_dim)
    values = value_dim or head_dim
    # The mean width of attention's matrix products. In forward one product is as wide as k and one as wide as v. In
    # backward three are as wide as k and two as wide as v.
    width, width_backward = heads * (head_dim + values) / 2, heads * (3 * head_dim + 2 * values) / 5
    share, share_backward = width / 4096, width_backward / 4096
    # Each product has 2 FLOPs per pair and column, so forward has 4 and backward 10. The terms' other figures are the
    # fit, for a width of 4096. Linear layers have 2 FLOPs per weight and row in forward, and 4 in backward.
    return AnalyticCost(
        shape,
        block,
        forward_terms=(4 * width / 677e12, 13.9e-9 * share, 0.2e-9 * share),
        backward_terms=(10 * width_backward / 594e12, 17.9e-9 * share_backward, 18.6e-9 * share_backward),
        linear=LinearRate(2 / 718e12, 4 / 686e12),
    )


def area_cost(
    heads: int = 1, kv_heads: int = 1, head_dim: int = 1, *, value_bytes: int = 2, block: int = 1, value_dim: int = 0
) -> AnalyticCost:
    """Returns a cost model that counts pairs only: a pair takes 1 second in forward and 2.5 seconds in backward.

    The arguments are those of :func:`analytic_cost`; they do not change the seconds of a pair."""
    shape = AttentionShape(heads, kv_heads, head_dim, value_bytes, value_dim)
    return AnalyticCost(shape, block, (1.0, 0.0, 0.0), (2.5, 0.0, 0.0))


def cost_of_kind(kind: AttentionKind, cost: CostModel) -> CostModel:
    """Returns the cost model for a ``kind`` of attention layer, from the ``cost`` of layers without a window.

    For a kind with a window the result is a formula (for a PoolCost, one per table). From a measured table the formula
    is scaled: without its window it would give the table's seconds for a document of 32,768 tokens."""
    if not kind.window:
        return cost
    if isinstance(cost, PoolCost):
        return cost.changed(lambda table: cost_of_kind(kind, table))
    if isinstance(cost, ScaledCost) and isinstance(cost.measured, AnalyticCost):
        return cost_of_kind(kind, cost.measured.times(cost.forward_factor, cost.backward_factor))
    if isinstance(cost, AnalyticCost):
        return replace(cost, window=kind.window)
    shape = cost.shape
    sizes = {"value_bytes": shape.value_bytes, "block": cost.block, "value_dim": shape.value_dim}
    model = analytic_cost(shape.heads, shape.kv_heads, shape.head_dim, **sizes)
    rows = np.array([_LONG])
    scale = [float(getattr(cost, way)(rows, rows)[0] / getattr(model, way)(rows, rows)[0]) for way in _WAYS]
    return replace(model.times(*scale), window=kind.window, linear=cost.linear)
