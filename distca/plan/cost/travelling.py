"""Cost models that also count the time in which a task's rows travel, for servers without rows of their own.

A *CA-task* is a range of a document's queries with all keys up to them, computed by a *server*: a rank that gets the
rows from their *home*, the rank that holds them. Most servers are homes, too, and compute linear layers while rows
travel. A server without rows waits instead. All ranks take part in all exchanges in one order, so the next rows do not
leave before its last results are home. So the planner counts a part of the travel time as work of this server.

Array legend: R servers, K directions (forward, backward), N tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.plan.cost.model import CostModel, Direction
from distca.plan.cost.pool import PoolCost

WAITED_FOR = 0.4
"""The part of its rows' travel time, there and back, that counts as work of a server without rows.

A layer has two plans, since its rows are computed in two parts, ping and pong, which travel beside each other's
compute. A server waits about once a layer, so in each plan it waits for about half of the travel time. The part is
smaller, because a plan counts the keys of each task, though a server may have them from another task. It was chosen by
simulated speeds (benchmarks/results/simulated.md)."""


@dataclass(frozen=True)
class TravellingCost(CostModel):
    """Another model's seconds, plus seconds for each query row and each key/value row of the task.

    Attributes:
        kernel: the other model.
        forward_rows: seconds for one query row and for one key/value row, in forward.
        backward_rows: the same in backward.
        shape, block, linear: those of the other model.
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
        travel = np.stack([_travel(each, q_rows, kv_rows) for each in self._rows(direction)])
        return self.kernel.per_direction(direction, q_rows, kv_rows) + travel

    def of_few(self, direction: Direction, q_rows: Sequence[float], kv_rows: Sequence[float]) -> list[list[float]]:
        seconds = self.kernel.of_few(direction, q_rows, kv_rows)
        return [
            [own + (of_q * q + of_kv * kv if q else 0.0) for own, q, kv in zip(each, q_rows, kv_rows, strict=True)]
            for each, (of_q, of_kv) in zip(seconds, self._rows(direction), strict=True)
        ]

    def _rows(self, direction: Direction) -> tuple[tuple[float, float], ...]:
        both = self.forward_rows, self.backward_rows
        return {"both": both, "forward": both[:1], "backward": both[1:]}[direction]


def _travel(seconds: tuple[float, float], q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
    """[N] seconds for the rows of tasks; 0 for tasks without queries."""
    return np.where(np.asarray(q_rows) > 0, seconds[0] * np.asarray(q_rows) + seconds[1] * np.asarray(kv_rows), 0.0)


def with_travel(
    cost: PoolCost, has_rows: np.ndarray, bytes_per_s: np.ndarray, *, resend: bool, sinks: bool
) -> PoolCost:
    """Returns ``cost`` with another table for each server without rows, which counts a part of the rows' travel time.

    Args:
        cost: the seconds of the pool's kernels.
        has_rows: [R] bool, whether a server has rows of its own.
        bytes_per_s: [R] bytes per second that a server can receive, and send at the same time.
        resend, sinks: as in :meth:`distca.plan.cost.model.AttentionShape.moved_bytes`.
    """
    # "ways" has the bytes of a query row and of a key/value row, in forward and in backward. Servers with the same
    # kernel and link share a table: "made" has its index.
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
