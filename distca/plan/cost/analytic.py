"""Cost models by formula: one fitted to measured rates, and one that counts FLOPs only.

A cost model tells the planner the seconds of attention tasks (model.py). A *task* is the query range
[kv_rows - q_rows, kv_rows) of a document; each query sees all keys up to itself, or with a *window* the last few of
them. A *pair* is a query with a key that it sees. A kernel computes *tiles* of ``block`` query rows.

The planner uses these models if there is no measured table for the GPU and heads, and for windows. Measured tables
(table.py) interpolate between their points with them.

Array legend: K directions (forward, backward), N tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from distca.plan.cost.linear import LinearRate
from distca.plan.cost.model import AttentionShape, CostModel, Direction
from distca.plan.cost.pool import PoolCost
from distca.plan.geometry import causal_pairs, keys_seen, pairs
from distca.plan.kinds import AttentionKind

_LONG = 32768
"""Tokens of the document for which a scaled formula takes the same time as a measured table without a window. So long a
document fills a GPU, and every table of a GPU has it."""

_WAYS = ("forward", "backward")


@dataclass(frozen=True)
class AnalyticCost(CostModel):
    """Seconds of a task = pairs x a + query rows x b + k,v rows x c, with other a, b, c in forward and backward.

    The term of query rows is the overhead of each tile: its start, its end and its half-empty part at the diagonal. The
    term of k,v rows is the time in which keys and values are loaded. It is small in forward. Backward also stores dK
    and dV of each block of keys, however few queries read it.

    Attributes:
        shape: heads of the attention layer.
        block: query rows of one kernel tile.
        forward_terms: a, b and c in forward, in seconds.
        backward_terms: a, b and c in backward, in seconds.
        linear: seconds of matrix products on the same device; None if unknown.
        window: the number of keys that a query sees; 0 for all. Kernels compute whole tiles at both ends of a window,
            so the model counts ``block`` - 1 more keys.
    """

    shape: AttentionShape
    block: int
    forward_terms: tuple[float, float, float]
    backward_terms: tuple[float, float, float]
    linear: LinearRate | None = None
    window: int = 0

    def times(self, forward: float, backward: float) -> AnalyticCost:
        """The same model with all seconds multiplied by ``forward`` and ``backward`` in these directions."""
        a, b, c = self.forward_terms
        d, e, f = self.backward_terms
        return replace(
            self,
            forward_terms=(a * forward, b * forward, c * forward),
            backward_terms=(d * backward, e * backward, f * backward),
        )

    @cached_property
    def _terms(self) -> dict[Direction, np.ndarray]:
        """The terms a, b and c, [K, 3] for each direction."""
        both = np.array((self.forward_terms, self.backward_terms))
        return {"both": both, "forward": both[:1], "backward": both[1:]}

    def forward(self, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return self.per_direction("forward", q_rows, kv_rows)[0]

    def backward(self, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return self.per_direction("backward", q_rows, kv_rows)[0]

    def per_direction(self, direction: Direction, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        terms, q = self._terms[direction], np.asarray(q_rows, np.float64)
        # A task without queries costs nothing, so its keys are not counted.
        kv = kv_rows * (q > 0)
        if self.window:
            seen = self.window + self.block - 1
            features = np.array((pairs(q, kv, seen), q, keys_seen(q, kv, seen)))
            return terms.dot(features.reshape(3, -1)).reshape(len(terms), *q.shape)
        features = np.array((causal_pairs(q, kv), q, kv))
        return terms.dot(features.reshape(3, -1)).reshape(len(terms), *q.shape)

    def of_few(self, direction: Direction, q_rows: Sequence[float], kv_rows: Sequence[float]) -> list[list[float]]:
        if self.window:
            return super().of_few(direction, q_rows, kv_rows)
        each = [(causal_pairs(q, kv), q, kv if q else 0) for q, kv in zip(q_rows, kv_rows, strict=True)]
        return [[a * pair + b * q + c * kv for pair, q, kv in each] for a, b, c in self._terms[direction].tolist()]


def analytic_cost(
    heads: int, kv_heads: int, head_dim: int, *, value_bytes: int = 2, block: int = 128, value_dim: int = 0
) -> AnalyticCost:
    """The cost model for GPUs without a measured table: a least-squares fit to flash-attn-4's times on one H200.

    The fit is within 9 % of ten measured rates in forward, and within 6.5 % in backward (32 query heads, 8 k,v heads of
    128, causal; benchmarks/results/planner.md). For other heads every term is scaled with heads x head_dim, since only
    ratios of seconds matter to a plan.

    Args:
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: numbers of a query or key head.
        value_bytes: bytes of one number.
        block: query rows of one kernel tile.
        value_dim: numbers of a value head, if these are narrower; 0 for ``head_dim``. Forward has two matrix products
            per pair, of which one has this width. Backward has five, of which two have it.
    """
    shape = AttentionShape(heads, kv_heads, head_dim, value_bytes, value_dim)
    values = value_dim or head_dim
    width, width_backward = heads * (head_dim + values) / 2, heads * (3 * head_dim + 2 * values) / 5
    share, share_backward = width / 4096, width_backward / 4096
    # The figures of the fit. A pair has 4 FLOPs per column of all heads in forward and 10 in backward, at 677 and 594
    # TFLOP/s. Rows take 0.2 to 18.6 ns at 4,096 columns, the 32 heads of 128 that were measured. A weight has 2 and 4
    # FLOPs, at 718 and 686 TFLOP/s.
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
    """The cost model that only counts FLOPs: a pair takes 1 second in forward and 2.5 seconds in backward.

    It is for tests, tiny models and CPU runs, whose kernels have no tiles. Arguments as in :func:`analytic_cost`."""
    shape = AttentionShape(heads, kv_heads, head_dim, value_bytes, value_dim)
    return AnalyticCost(shape, block, (1.0, 0.0, 0.0), (2.5, 0.0, 0.0))


def cost_of_kind(kind: AttentionKind, cost: CostModel) -> CostModel:
    """The cost model for a kind of attention layer, made from the ``cost`` of layers without a window.

    For a kind with a window this is the formula. If ``cost`` is a measured table, the formula is first scaled such that
    both agree on a document of 32,768 tokens without a window."""
    if not kind.window:
        return cost
    if isinstance(cost, PoolCost):
        return cost.changed(lambda table: cost_of_kind(kind, table))
    if isinstance(cost, AnalyticCost):
        return replace(cost, window=kind.window)
    shape = cost.shape
    sizes = {"value_bytes": shape.value_bytes, "block": cost.block, "value_dim": shape.value_dim}
    model = analytic_cost(shape.heads, shape.kv_heads, shape.head_dim, **sizes)
    rows = np.array([_LONG])
    scale = [float(getattr(cost, way)(rows, rows)[0] / getattr(model, way)(rows, rows)[0]) for way in _WAYS]
    return replace(model.times(*scale), window=kind.window, linear=cost.linear)
