"""A cost model (seconds of attention by number of rows) that multiplies another model's seconds by constant factors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca.errors import PlanError
from distca.plan.cost.model import CostModel, Direction


@dataclass(frozen=True)
class ScaledCost(CostModel):
    """The attention seconds of the model ``measured``, times a factor in forward and a factor in backward.

    Attributes:
        measured: the model to scale.
        forward_factor, backward_factor: finite factors above 0.

    Raises:
        PlanError: a factor is not finite, or not above 0.
    """

    measured: CostModel
    forward_factor: float
    backward_factor: float

    def __post_init__(self) -> None:
        for name in ("shape", "block", "linear"):
            object.__setattr__(self, name, getattr(self.measured, name))
        for factor in (self.forward_factor, self.backward_factor):
            if not 0 < factor < math.inf:
                raise PlanError(
                    f"A server is {factor:g} times as slow as another; this must be a finite number above 0."
                )

    @property
    def window(self) -> int:
        """The most keys that a query attends to; 0 for all keys."""
        return int(getattr(self.measured, "window", 0))

    def factors(self, direction: Direction) -> list[float]:
        both = [self.forward_factor, self.backward_factor]
        return {"both": both, "forward": both[:1], "backward": both[1:]}[direction]

    def forward(self, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return self.forward_factor * self.measured.forward(q_rows, kv_rows)

    def backward(self, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return self.backward_factor * self.measured.backward(q_rows, kv_rows)

    def per_direction(self, direction: Direction, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        seconds = self.measured.per_direction(direction, q_rows, kv_rows)
        return np.asarray(self._column(direction, seconds.ndim) * seconds)

    def least(self, direction: Direction, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        seconds = self.measured.least(direction, q_rows, kv_rows)
        return np.asarray(self._column(direction, seconds.ndim) * seconds)

    def of_few(self, direction: Direction, q_rows: Sequence[float], kv_rows: Sequence[float]) -> list[list[float]]:
        seconds = self.measured.of_few(direction, q_rows, kv_rows)
        return [[factor * own for own in each] for factor, each in zip(self.factors(direction), seconds, strict=True)]

    def _column(self, direction: Direction, dimensions: int) -> np.ndarray:
        return np.array(self.factors(direction)).reshape(-1, *[1] * (dimensions - 1))


def scaled(cost: CostModel, forward: float, backward: float) -> CostModel:
    """Returns ``cost`` with its attention seconds multiplied by ``forward`` and ``backward``, two factors above 0."""
    if forward == backward == 1.0:
        return cost
    if isinstance(cost, ScaledCost):
        return replace(
            cost,
            forward_factor=cost.forward_factor * forward,
            backward_factor=cost.backward_factor * backward,
        )
    return ScaledCost(cost, forward, backward)
