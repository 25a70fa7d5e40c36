"""Cost models that add the time in which a task's rows travel there and back, for servers without rows of their own.

A *task* is a range of a document's queries, with all keys that the queries see. A *server* is a rank that computes
tasks. *Rows* are tokens' q, k and v, and what comes back. While rows travel, a server that has rows of its own computes
linear layers. A server that has none waits, so a part of the travel time counts as its attention time.

Array legend: R servers, K directions (forward, backward), N tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.plan.cost.model import CostModel, Direction
from distca.plan.cost.pool import PoolCost

WAITED_FOR = 0.4
"""The fraction of travel time that counts as attention time of a server without rows of its own. With a larger value
the server gets fewer tasks. The value was chosen by simulation (benchmarks/results/simulated.md)."""


@dataclass(frozen=True)
class TravellingCost(CostModel):
    """The seconds of the cost model ``kernel``, plus seconds for each query row and each key/value row of a task.

    Attributes:
        forward_rows, backward_rows: seconds to add for one query row, and for one key/value row.
    """

    kernel: CostModel
    forward_rows: tuple[float, float]
    backward_rows: tuple[float, float]

    def __post_init__(self) -> None:
        for name in ("shape", "block", "linear"):
            object.__setattr__(self, name, getattr(self.kernel, name))

    def forward(self, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return np.asarray(self.kernel.forward(q_rows, kv_rows) + _travel(self.forward_rows, q_rows, kv_rows))

    def backward(self, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return np.asarray(self.kernel.backward(q_rows, kv_rows) + _travel(self.backward_rows, q_rows, kv_rows))

    def per_direction(self, direction: Direction, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return self.kernel.per_direction(direction, q_rows, kv_rows) + self._travels(direction, q_rows, kv_rows)

    def least(self, direction: Direction, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        # Cutting a task saves no travel: the parts together have all its query rows, and the last part all its keys.
        return self.kernel.least(direction, q_rows, kv_rows) + self._travels(direction, q_rows, kv_rows)

    def of_few(self, direction: Direction, q_rows: Sequence[float], kv_rows: Sequence[float]) -> list[list[float]]:
        seconds = self.kernel.of_few(direction, q_rows, kv_rows)
        return [
            [own + (of_q * q + of_kv * kv if q else 0.0) for own, q, kv in zip(each, q_rows, kv_rows, strict=True)]
            for each, (of_q, of_kv) in zip(seconds, self._rows(direction), strict=True)
        ]

    def _travels(self, direction: Direction, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return np.stack([_travel(each, q_rows, kv_rows) for each in self._rows(direction)])

    def _rows(self, direction: Direction) -> tuple[tuple[float, float], ...]:
        both = self.forward_rows, self.backward_rows
        return {"both": both, "forward": both[:1], "backward": both[1:]}[direction]


def _travel(seconds: tuple[float, float], q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
    return np.where(np.asarray(q_rows) > 0, seconds[0] * np.asarray(q_rows) + seconds[1] * np.asarray(kv_rows), 0.0)


def with_travel(
    cost: PoolCost, has_rows: np.ndarray, bytes_per_s: np.ndarray, *, resend: bool, sinks: bool
) -> PoolCost:
    """Returns ``cost`` with travel time added for servers without rows of their own.

    Args:
        has_rows: [R] bool, whether a server has rows of its own.
        bytes_per_s: [R] bytes per second that a server can receive while it sends equally many.
        resend, sinks: arguments of :meth:`~distca.plan.cost.model.AttentionShape.moved_bytes`.
    """
    # ways: for forward and backward, the bytes of a query row and of a key/value row. made: the index of the new table
    # for each pair of an old table's index and bytes per second.
    ways = [cost.shape.moved_bytes(direction, resend, sinks) for direction in ("forward", "backward")]
    tables, of_server = list(cost.tables), list(cost.of_server)
    made: dict[tuple[int, float], int] = {}
    for server in np.flatnonzero(~has_rows).tolist():
        key = of_server[server], float(bytes_per_s[server])
        if key not in made:
            made[key] = len(tables)
            forward, backward = ((WAITED_FOR * q / key[1], WAITED_FOR * kv / key[1]) for q, kv in ways)
            tables.append(TravellingCost(cost.tables[key[0]], forward, backward))
        of_server[server] = made[key]
    return PoolCost(tuple(tables), tuple(of_server))
