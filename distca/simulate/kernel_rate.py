"""Costs of a core-attention kernel that is faster or slower than the measured one, evenly at all lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.plan import AttentionShape, CostModel, Direction
from distca.simulate.errors import SimulationError

_LONG = 65_536


@dataclass(frozen=True)
class ScaledCost(CostModel):
    """Another model's seconds, times a factor.

    Attributes:
        measured: the other model.
        factor: above 0.
        shape, block, linear: the other model's.
    """

    measured: CostModel
    factor: float

    def __post_init__(self) -> None:
        for name in ("shape", "block", "linear"):
            object.__setattr__(self, name, getattr(self.measured, name))

    def forward(self, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return self.factor * self.measured.forward(q_rows, kv_rows)

    def backward(self, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return self.factor * self.measured.backward(q_rows, kv_rows)

    def per_direction(self, direction: Direction, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return self.factor * self.measured.per_direction(direction, q_rows, kv_rows)

    def least(self, direction: Direction, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return self.factor * self.measured.least(direction, q_rows, kv_rows)


def forward_tflops(cost: CostModel) -> float:
    """TFLOP/s of a long document's forward on one GPU."""
    shape: AttentionShape = cost.shape
    pairs = _LONG * (_LONG + 1) / 2
    seconds = float(cost.forward(np.array([_LONG]), np.array([_LONG]))[0])
    return 4 * shape.heads * shape.head_dim * pairs / seconds / 1e12


def at_rate(cost: CostModel, tflops: float) -> CostModel:
    """``cost`` with seconds scaled so that a long document's forward runs at ``tflops``.

    Raises:
        SimulationError: the rate is not above 0.
    """
    if not tflops > 0:
        raise SimulationError(f"`attention_tflops` is {tflops:g}; it must be above 0.")
    return ScaledCost(cost, forward_tflops(cost) / tflops)
