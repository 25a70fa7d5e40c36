"""Analytic cost models: a fit to measured rates, and plain FLOP counting.

Array legend: K directions, N tasks.
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
"""Tokens of the document at which the analytic model of a window is made to agree with a measured table: long enough to
fill a GPU, and measured in every table of one."""

_WAYS = ("forward", "backward")


@dataclass(frozen=True)
class AnalyticCost(CostModel):
    """seconds = pairs / rate + q rows x tile overhead + k,v rows x load overhead.

    The q term is what every tile costs at its start, its end and the diagonal. The k,v term is what every task costs
    for its keys. It is small in forward. In backward every block of keys is loaded and its dK and dV stored, however
    few queries read it.

    Attributes:
        shape: the attention layer.
        block: query rows of one kernel tile.
        forward_terms: seconds per (pair, q row, k,v row) in forward.
        backward_terms: the same in backward.
        linear: seconds of matrix products on the same device.
        window: most keys that a query sees; 0 for all. Kernels compute whole tiles at both ends of a window, so one
            tile of keys is added.
    """

    shape: AttentionShape
    block: int
    forward_terms: tuple[float, float, float]
    backward_terms: tuple[float, float, float]
    linear: LinearRate | None = None
    window: int = 0

    def times(self, forward: float, backward: float) -> AnalyticCost:
        """The same model with all seconds multiplied by a factor for ``forward`` and one for ``backward``."""
        a, b, c = self.forward_terms
        d, e, f = self.backward_terms
        return replace(
            self,
            forward_terms=(a * forward, b * forward, c * forward),
            backward_terms=(d * backward, e * backward, f * backward),
        )

    @cached_property
    def _terms(self) -> dict[Direction, np.ndarray]:
        """The [K, 3] terms of a pair, a q row and a k,v row, by direction."""
        both = np.array((self.forward_terms, self.backward_terms))
        return {"both": both, "forward": both[:1], "backward": both[1:]}

    def forward(self, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return self.per_direction("forward", q_rows, kv_rows)[0]

    def backward(self, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return self.per_direction("backward", q_rows, kv_rows)[0]

    def per_direction(self, direction: Direction, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        terms, q = self._terms[direction], np.asarray(q_rows, np.float64)
        # A range without queries costs nothing, whatever its keys.
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
    """The cost model where there is no measured table: a least-squares fit to flash-attn-4's times on one H200.

    The fit reproduces the ten measured rates (32 heads, 8 k,v heads, d 128, causal) within 9 % forward, 6.5 % backward
    (benchmarks/results/planner.md). For other shapes every term is scaled with heads x head_dim; only ratios matter to
    a plan. Narrower values count in one of two products forward, and in two of five backward.
    """
    shape = AttentionShape(heads, kv_heads, head_dim, value_bytes, value_dim)
    values = value_dim or head_dim
    width, width_backward = heads * (head_dim + values) / 2, heads * (3 * head_dim + 2 * values) / 5
    share, share_backward = width / 4096, width_backward / 4096
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
    """The cost model that counts FLOPs alone: seconds are query-key pairs. It is for tests, tiny models and CPU runs,
    which have no tiles."""
    shape = AttentionShape(heads, kv_heads, head_dim, value_bytes, value_dim)
    return AnalyticCost(shape, block, (1.0, 0.0, 0.0), (2.5, 0.0, 0.0))


def cost_of_kind(kind: AttentionKind, cost: CostModel) -> CostModel:
    """Seconds per CA-task of a kind, from the ``cost`` of layers without a window.

    Windows are always counted by the analytic model. Where the cost is a measured table, the model is scaled so that
    both agree on a long document."""
    if not kind.window:
        return cost
    if isinstance(cost, PoolCost):
        return cost.changed(lambda table: cost_of_kind(kind, table))
    if isinstance(cost, AnalyticCost):
        return replace(cost, window=kind.window)
    shape = cost.shape
    model = analytic_cost(shape.heads, shape.kv_heads, shape.head_dim, value_bytes=shape.value_bytes, block=cost.block)
    rows = np.array([_LONG])
    scale = [float(getattr(cost, way)(rows, rows)[0] / getattr(model, way)(rows, rows)[0]) for way in _WAYS]
    return replace(model.times(*scale), window=kind.window, linear=cost.linear)
