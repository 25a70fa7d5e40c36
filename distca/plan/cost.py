"""What a CA-task costs: seconds of the attention kernel over (query rows, key rows), forward and backward.

A task with ``q_rows`` queries and ``kv_rows`` keys is the causal query range [kv_rows - q_rows, kv_rows) of a document.
Seconds are those a task adds to a *full* fused batch, so a batch costs the sum over its tasks: one small task alone
cannot fill the GPU, but a plan never runs one alone. Array legend: N tasks; rows are int64, seconds float64.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from distca.plan.errors import PlanError

Direction = Literal["forward", "backward", "both"]


@dataclass(frozen=True)
class AttentionShape:
    """Heads of one attention layer on one rank (after tensor parallelism) and the bytes of one value."""

    heads: int
    kv_heads: int
    head_dim: int
    value_bytes: int = 2

    def __post_init__(self) -> None:
        if min(self.heads, self.kv_heads, self.head_dim, self.value_bytes) < 1 or self.heads % self.kv_heads:
            raise PlanError(
                f"{self.heads} query heads cannot share {self.kv_heads} key/value heads of size {self.head_dim}: "
                "heads must be a positive multiple of kv_heads."
            )

    @property
    def q_bytes(self) -> int:
        """Bytes of one row of q, o, dO or dQ."""
        return self.heads * self.head_dim * self.value_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of one row of k and v together, or of dK and dV."""
        return 2 * self.kv_heads * self.head_dim * self.value_bytes

    def moved_bytes(self, direction: Direction, resend: bool = False) -> tuple[int, int]:
        """Bytes that travel for one query row and for one key/value row computed away from home.

        Forward: q out, o back; k, v out. Backward, keep: dO out, dQ back; dK, dV back. Backward, resend: q, o, dO and
        lse out, dQ back; k, v out again, dK, dV back; o and lse then also came back in forward.
        """
        lse = 4 * self.heads if resend else 0
        forward = (2 * self.q_bytes + lse, self.kv_bytes)
        backward = (4 * self.q_bytes + lse, 2 * self.kv_bytes) if resend else (2 * self.q_bytes, self.kv_bytes)
        if direction == "both":
            return forward[0] + backward[0], forward[1] + backward[1]
        return forward if direction == "forward" else backward


class CostModel(ABC):
    """Seconds of CA-tasks inside a full batch.

    Attributes:
        shape: the attention layer.
        block: query rows of one kernel tile; cuts fall on multiples of it.
    """

    shape: AttentionShape
    block: int

    @abstractmethod
    def forward(self, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        """[N] seconds of the forward kernel for query ranges [kv_rows - q_rows, kv_rows); 0 where q_rows is 0."""

    @abstractmethod
    def backward(self, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        """[N] seconds of the backward kernel."""

    def least(self, direction: Direction, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        """[K, N] seconds that the ranges take at least, however they are cut. By default cutting never helps."""
        return self.per_direction(direction, q_rows, kv_rows)

    def per_direction(self, direction: Direction, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        """[K, N] seconds; K is 2 (forward, backward) for "both", else 1."""
        if direction == "both":
            return np.stack((self.forward(q_rows, kv_rows), self.backward(q_rows, kv_rows)))
        return np.asarray(getattr(self, direction)(q_rows, kv_rows))[None]


def pairs(q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
    """[N] float64 query-key pairs under the causal mask; a FLOP count is 4 x head_dim x heads of it (backward: 10
    x)."""
    q = np.asarray(q_rows, np.float64)
    return q * (kv_rows - (q - 1) * 0.5)


@dataclass(frozen=True)
class AnalyticCost(CostModel):
    """seconds = pairs / rate + q rows x tile overhead + k,v rows x load overhead.

    The q term is what every tile pays at its start, end and diagonal; the k,v term is what every task pays for its keys
    (small in forward; in backward every block of keys is loaded and its dK and dV stored, however few queries read it).

    Attributes:
        shape: the attention layer.
        block: query rows of one kernel tile.
        forward_terms: seconds per (pair, q row, k,v row).
        backward_terms: the same for backward.
    """

    shape: AttentionShape
    block: int
    forward_terms: tuple[float, float, float]
    backward_terms: tuple[float, float, float]

    def forward(self, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return _linear((self.forward_terms,), q_rows, kv_rows)[0]

    def backward(self, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return _linear((self.backward_terms,), q_rows, kv_rows)[0]

    def per_direction(self, direction: Direction, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        if direction == "both":
            return _linear((self.forward_terms, self.backward_terms), q_rows, kv_rows)
        return _linear((self.forward_terms if direction == "forward" else self.backward_terms,), q_rows, kv_rows)


def _linear(terms: tuple[tuple[float, float, float], ...], q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
    """[K, ...] seconds for each of K triples of terms; 0 without queries, whatever the keys."""
    q = np.asarray(q_rows, np.float64)
    kv = kv_rows * (q > 0)
    features = np.array((q * (kv - 0.5 * (q - 1)), q, kv))
    return (np.array(terms) @ features.reshape(3, -1)).reshape(len(terms), *q.shape)


def analytic_cost(heads: int, kv_heads: int, head_dim: int, *, value_bytes: int = 2, block: int = 128) -> AnalyticCost:
    """Cost model without a measured table: least squares over flash-attn-4 figures of one H200 (see docs/planning.md).

    The fit reproduces the ten measured rates (32 heads, 8 k,v heads, d 128, causal) within 9 % forward, 6.5 % backward.
    Other shapes scale every term with heads x head_dim. Only ratios matter to a schedule.
    """
    shape = AttentionShape(heads, kv_heads, head_dim, value_bytes)
    width = heads * head_dim
    share = width / 4096
    return AnalyticCost(
        shape,
        block,
        forward_terms=(4 * width / 677e12, 13.9e-9 * share, 0.2e-9 * share),
        backward_terms=(10 * width / 594e12, 17.9e-9 * share, 18.6e-9 * share),
    )


def area_cost(heads: int = 1, kv_heads: int = 1, head_dim: int = 1, *, block: int = 1) -> AnalyticCost:
    """Pure FLOP counting: seconds are query-key pairs. For tests, tiny models and CPU runs, where tiles mean
    nothing."""
    return AnalyticCost(AttentionShape(heads, kv_heads, head_dim), block, (1.0, 0.0, 0.0), (2.5, 0.0, 0.0))


class TableCost(CostModel):
    """Measured seconds, interpolated.

    The table is used as a factor on the analytic model: bilinear in (log2 q rows, log2 k,v rows) between measured
    points and constant beyond them, so that it is exact at every measured point and sensible outside the grid.

    Args:
        shape: the attention layer that was measured.
        q_rows: [Q] increasing query rows measured.
        kv_rows: [V] increasing k,v rows measured.
        forward_seconds: [Q, V] seconds per task inside a full batch; nan where q_rows > kv_rows or not measured.
        backward_seconds: [Q, V] the same for backward.
        block: query rows of one kernel tile.

    Raises:
        PlanError: on a table whose axes are not increasing or which has no measured point in some column.
    """

    def __init__(
        self,
        shape: AttentionShape,
        q_rows: np.ndarray,
        kv_rows: np.ndarray,
        forward_seconds: np.ndarray,
        backward_seconds: np.ndarray,
        block: int = 128,
    ) -> None:
        self.shape = shape
        self.block = block
        self._base = analytic_cost(
            shape.heads, shape.kv_heads, shape.head_dim, value_bytes=shape.value_bytes, block=block
        )
        q_axis, kv_axis = np.asarray(q_rows, np.float64), np.asarray(kv_rows, np.float64)
        for name, axis in (("q_rows", q_axis), ("kv_rows", kv_axis)):
            if len(axis) == 0 or axis[0] < 1 or (np.diff(axis) <= 0).any():
                raise PlanError(f"The cost table's {name} must be positive and increasing, not {axis.tolist()}.")
        self._log_q, self._log_kv = np.log2(q_axis), np.log2(kv_axis)
        grid = np.meshgrid(q_axis, kv_axis, indexing="ij")
        self._forward_factor = _factors("forward", forward_seconds, self._base.forward(*grid))
        self._backward_factor = _factors("backward", backward_seconds, self._base.backward(*grid))

    def forward(self, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return self._base.forward(q_rows, kv_rows) * self._interpolate(self._forward_factor, q_rows, kv_rows)

    def backward(self, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return self._base.backward(q_rows, kv_rows) * self._interpolate(self._backward_factor, q_rows, kv_rows)

    def least(self, direction: Direction, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        """The analytic model, which cutting never makes cheaper, at the best measured factor."""
        factors = {"forward": (self._forward_factor,), "backward": (self._backward_factor,)}
        best = [factor.min() for factor in factors.get(direction, (self._forward_factor, self._backward_factor))]
        return self._base.per_direction(direction, q_rows, kv_rows) * np.array(best)[:, None]

    def _interpolate(self, factor: np.ndarray, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        q, dq = _cell(self._log_q, q_rows)
        v, dv = _cell(self._log_kv, kv_rows)
        q1, v1 = np.minimum(q + 1, len(self._log_q) - 1), np.minimum(v + 1, len(self._log_kv) - 1)
        low = factor[q, v] * (1 - dv) + factor[q, v1] * dv
        high = factor[q1, v] * (1 - dv) + factor[q1, v1] * dv
        return low * (1 - dq) + high * dq


def _cell(axis: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Index of the grid cell that holds each value, and the place in it, from 0 to 1."""
    at = np.clip(np.log2(np.maximum(rows, 1)), axis[0], axis[-1])
    low = np.clip(np.searchsorted(axis, at, side="right") - 1, 0, max(len(axis) - 2, 0))
    width = axis[np.minimum(low + 1, len(axis) - 1)] - axis[low]
    return low, np.divide(at - axis[low], width, out=np.zeros_like(at), where=width > 0)


def _factors(name: str, seconds: np.ndarray, base: np.ndarray) -> np.ndarray:
    """Measured over analytic seconds; a hole takes the value of the nearest measured q rows with the same k,v rows."""
    table = np.asarray(seconds, np.float64)
    if table.shape != base.shape:
        raise PlanError(f"The cost table's {name} seconds have shape {table.shape}; its axes ask for {base.shape}.")
    if np.isnan(table).all(axis=0).any() or (table <= 0).any() or np.isinf(table).any():
        raise PlanError(f"The cost table's {name} seconds must be positive, with a measured value for every kv_rows.")
    factor = table / base
    for column in factor.T:
        known = np.flatnonzero(~np.isnan(column))
        nearest = np.abs(np.arange(len(column))[:, None] - known[None]).argmin(axis=1)
        column[:] = column[known[nearest]]
    return factor


def load_table(path: str | Path) -> TableCost:
    """Read a cost table: JSON with heads, kv_heads, head_dim, block, q_rows [Q], kv_rows [V], and forward_seconds and
    backward_seconds [Q][V] per task inside a full batch (null where q_rows > kv_rows). Other keys describe the machine.

    Raises:
        PlanError: when the file lacks a key or its table is not usable.
    """
    content = json.loads(Path(path).read_text())
    wanted = ("heads", "kv_heads", "head_dim", "q_rows", "kv_rows", "forward_seconds", "backward_seconds")
    missing = [key for key in wanted if key not in content]
    if missing:
        raise PlanError(f"The cost table {path} lacks {', '.join(missing)}; measure it again with `distca profile`.")
    q_rows, kv_rows, forward, backward = (np.asarray(content[key], np.float64) for key in wanted[3:])
    shape = AttentionShape(content["heads"], content["kv_heads"], content["head_dim"], content.get("value_bytes", 2))
    return TableCost(shape, q_rows, kv_rows, forward, backward, block=content.get("block", 128))
