"""The interface of cost models: how long core attention takes, for the planner.

A *task* is the query range [kv_rows - q_rows, kv_rows) of a document, with all keys before kv_rows. A task's seconds
are the time that the task adds to a kernel call for many tasks.

Array legend: N tasks, K directions (forward, backward). Rows may be integers or floats; seconds are float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from distca.errors import PlanError
from distca.plan.cost.linear import LinearRate

Direction = Literal["forward", "backward", "both"]


@dataclass(frozen=True)
class AttentionShape:
    """Heads of one attention layer on one tensor-parallel rank, and the bytes of one number.

    Attributes:
        heads: query heads, a multiple of ``kv_heads``.
        kv_heads: key/value heads.
        head_dim: size of a query or key head.
        value_bytes: bytes of one number of q, k, v or o.
        value_dim: size of a value head, at most ``head_dim``; 0 stands for ``head_dim``.

    Raises:
        PlanError: a number is out of its range.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_bytes: int = 2
    value_dim: int = 0

    def __post_init__(self) -> None:
        if min(self.heads, self.kv_heads, self.head_dim, self.value_bytes) < 1 or self.heads % self.kv_heads:
            raise PlanError(
                f"{self.heads} query heads cannot share {self.kv_heads} key/value heads of size {self.head_dim}, "
                f"with {self.value_bytes} bytes per number: "
                "heads must be a positive multiple of kv_heads, and head_dim and value_bytes at least 1."
            )
        if not 0 <= self.value_dim <= self.head_dim:
            raise PlanError(f"value_dim is {self.value_dim}; it must be from 0 to the keys' size {self.head_dim}.")

    @property
    def q_bytes(self) -> int:
        """Returns the bytes of one row of q or dQ."""
        return self.heads * self.head_dim * self.value_bytes

    @property
    def o_bytes(self) -> int:
        """Returns the bytes of one row of o or dO."""
        return self.heads * (self.value_dim or self.head_dim) * self.value_bytes

    @property
    def kv_bytes(self) -> int:
        """Returns the bytes of one row of k and v together, or of dK and dV together."""
        return self.kv_heads * (self.head_dim + (self.value_dim or self.head_dim)) * self.value_bytes

    def moved_bytes(self, direction: Direction, resend: bool = False, sinks: bool = False) -> tuple[int, int]:
        """Returns the bytes that travel for one query row, and for one key/value row.

        A *home* is a rank that holds the tokens' rows; a *server* is a rank that computes attention.

        | | home to server | server to home |
        |---|---|---|
        | forward | q, k, v | o; with resend or sinks also lse |
        | backward | dO; with sinks also lse | dQ, dK, dV |
        | backward with resend | q, k, v, o, dO, lse | dQ, dK, dV |

        lse is the log-sum-exp of a row's scores, a float32 number for each query head.

        Args:
            direction: the direction to count; "both" is the sum.
            resend: whether homes send q, k and v again in backward.
            sinks: whether heads have *sinks*: learned scores in the softmax that belong to no key.
        """
        lse = 4 * self.heads if resend or sinks else 0
        both = self.q_bytes + self.o_bytes
        forward = (both + lse, self.kv_bytes)
        backward = (2 * both + lse, 2 * self.kv_bytes) if resend else (both + lse, self.kv_bytes)
        if direction == "both":
            return forward[0] + backward[0], forward[1] + backward[1]
        return forward if direction == "forward" else backward


class CostModel(ABC):
    """The seconds of tasks.

    Attributes:
        block: query rows of one kernel tile.
        linear: how long matrix products take; None if unknown.
    """

    shape: AttentionShape
    block: int
    linear: LinearRate | None = None

    @abstractmethod
    def forward(self, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        """Returns [N] seconds of the forward kernel for [N] ``q_rows`` and [N] ``kv_rows``; 0 for 0 query rows."""

    @abstractmethod
    def backward(self, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        """Returns [N] seconds of the backward kernel for [N] ``q_rows`` and [N] ``kv_rows``; 0 for 0 query rows."""

    def least(self, direction: Direction, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        """Returns [K, N] a lower bound on the seconds of each task if it may be cut into smaller tasks.

        The bound here is the seconds of the whole task. A model must override this method if the smaller tasks may
        take less time in sum."""
        return self.per_direction(direction, q_rows, kv_rows)

    def per_direction(self, direction: Direction, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        """Returns [K, N] seconds; K is 2 (forward, then backward) for "both", else 1."""
        if direction == "both":
            return np.stack((self.forward(q_rows, kv_rows), self.backward(q_rows, kv_rows)))
        return np.asarray(getattr(self, direction)(q_rows, kv_rows))[None]

    def on_servers(
        self, direction: Direction, q_rows: np.ndarray, kv_rows: np.ndarray, server: np.ndarray
    ) -> np.ndarray:
        """Returns [K, N] seconds of task n on server[n]."""
        return self.per_direction(direction, q_rows, kv_rows)

    def of_few(self, direction: Direction, q_rows: Sequence[float], kv_rows: Sequence[float]) -> list[list[float]]:
        """Returns the [K][N] seconds of :meth:`per_direction` as lists.

        Most models override this method, so that it is fast for few tasks."""
        q, kv = np.array(q_rows, np.float64), np.array(kv_rows, np.float64)
        seconds: list[list[float]] = self.per_direction(direction, q, kv).tolist()
        return seconds
