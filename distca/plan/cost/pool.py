"""The cost model of servers of unlike speed. Each server has a cost model, its *table*, for its GPU and kernel.

A *task* is a range of ``q_rows`` queries of a document, with all ``kv_rows`` keys up to the last query. A *server* is a
rank that computes tasks. A task's *work* on a server is its seconds there, divided by the server's slowness
(:meth:`PoolCost.work`). So it is about what a server of mean speed takes.

K directions (forward, backward), N tasks, R servers, C tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca.errors import PlanError
from distca.plan.cost.model import CostModel, Direction
from distca.plan.cost.scaled import scaled


@dataclass(frozen=True)
class PoolCost(CostModel):
    """Seconds of tasks on each server.

    Methods of :class:`CostModel` without an argument ``server`` use the first table.

    Attributes:
        tables: cost models.
        of_server: [R] index of each server's table.
        shape, block, linear: those of the first table, as in :class:`CostModel`.

    Raises:
        PlanError: there is no table, tables differ in heads or tiles, or a server has no table.
    """

    tables: tuple[CostModel, ...]
    of_server: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.tables or set(self.of_server) - set(range(len(self.tables))):
            raise PlanError(
                f"Servers name cost tables {sorted(set(self.of_server))}, counted from 0, but there are "
                f"{len(self.tables)} tables; give one table for each kind of GPU and kernel."
            )
        first = self.tables[0]
        for table in self.tables[1:]:
            if (table.shape, table.block) != (first.shape, first.block):
                raise PlanError(
                    f"Servers of one pool have cost tables of {first.shape} in tiles of {first.block} and of "
                    f"{table.shape} in tiles of {table.block}; measure the same heads on all with `distca profile`."
                )
        for name in ("shape", "block", "linear"):
            object.__setattr__(self, name, getattr(first, name))

    @property
    def window(self) -> int:
        """Returns the number of keys that a query sees; 0 without a limit."""
        return int(getattr(self.tables[0], "window", 0))

    def changed(self, change: Callable[[CostModel], CostModel]) -> PoolCost:
        return PoolCost(tuple(change(table) for table in self.tables), self.of_server)

    def forward(self, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return self.tables[0].forward(q_rows, kv_rows)

    def backward(self, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return self.tables[0].backward(q_rows, kv_rows)

    def per_direction(self, direction: Direction, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return self.tables[0].per_direction(direction, q_rows, kv_rows)

    def least(self, direction: Direction, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        return self.tables[0].least(direction, q_rows, kv_rows)

    def of_few(self, direction: Direction, q_rows: Sequence[float], kv_rows: Sequence[float]) -> list[list[float]]:
        return self.tables[0].of_few(direction, q_rows, kv_rows)

    def on_servers(
        self, direction: Direction, q_rows: np.ndarray, kv_rows: np.ndarray, server: np.ndarray
    ) -> np.ndarray:
        return seconds_on(self.tables, self._table[server], direction, q_rows, kv_rows)

    @cached_property
    def _table(self) -> np.ndarray:
        return np.array(self.of_server, np.int64)

    def work(self, direction: Direction, q_rows: np.ndarray, kv_rows: np.ndarray) -> ServerWork:
        """Returns the pool's :class:`ServerWork`.

        ``q_rows`` and ``kv_rows`` must be those of all tasks that the servers will compute.

        A server's *slowness* is the server's seconds for all tasks, over the work of all tasks. Example: one server
        takes 1 second for all tasks, and another takes 3 seconds. The mean speed is (1 + 1/3) / 2 = 2/3 of all tasks
        per second, so the work of all tasks is 1.5 seconds. The servers' slowness is 1/1.5 and 3/1.5.
        """
        # seconds [C, K]: each table's seconds for all tasks. ratio [C, K]: seconds over the first table's seconds.
        # speeds [R, K]: each server's speed, over the speed by the first table. of_table [C, K]: each table's slowness.
        # both [C, 2]: the factors from a table's seconds to work, in forward and in backward; equal if K is 1.
        seconds = np.stack([table.per_direction(direction, q_rows, kv_rows).sum(axis=1) for table in self.tables])
        ratio = np.divide(seconds, seconds[:1], out=np.ones_like(seconds), where=seconds[:1] > 0)
        speeds = 1.0 / ratio[self._table]
        of_table = ratio * speeds.mean(axis=0)
        both = (1.0 / np.repeat(of_table, 3 - of_table.shape[1], axis=1)).tolist()
        costs = tuple(scaled(table, *factors) for table, factors in zip(self.tables, both, strict=True))
        return ServerWork(direction, costs, self._table, of_table[self._table].T.copy())


def at_speeds(cost: CostModel, speeds: Sequence[float]) -> PoolCost:
    """Returns ``cost`` with the seconds of server r divided by speeds[r], in both directions."""
    tables, of_server = (cost.tables, cost.of_server) if isinstance(cost, PoolCost) else ((cost,), (0,) * len(speeds))
    each = [(number, float(speed)) for number, speed in zip(of_server, speeds, strict=True)]
    # PoolCost's methods without an argument "server" use the first table, so it stays first, with speed 1.
    unlike = list(dict.fromkeys([(0, 1.0), *each]))
    return PoolCost(
        tuple(scaled(tables[number], 1.0 / speed, 1.0 / speed) for number, speed in unlike),
        tuple(map(unlike.index, each)),
    )


@dataclass(frozen=True)
class ServerWork:
    """The work of tasks on every server, in seconds of a server of mean speed.

    Attributes:
        costs: [C] cost models that return work in place of seconds, one for each table.
        of_server: [R] index of each server's table; None if the cost model is no :class:`PoolCost`.
        slowness: [K, R] seconds that a server takes for one second of work; None in the same case.
    """

    direction: Direction
    costs: tuple[CostModel, ...]
    of_server: np.ndarray | None = None
    slowness: np.ndarray | None = None

    @staticmethod
    def of(cost: CostModel, direction: Direction, q_rows: np.ndarray, kv_rows: np.ndarray) -> ServerWork:
        """Returns the work by ``cost``; rows must be those of all tasks that the servers will compute.

        If ``cost`` is no :class:`PoolCost`, all servers are equally fast, and work is the seconds of ``cost``."""
        if isinstance(cost, PoolCost):
            return cost.work(direction, q_rows, kv_rows)
        return ServerWork(direction, (cost,))

    def same(self, server: int, other: int) -> bool:
        return self.of_server is None or bool(self.of_server[server] == self.of_server[other])

    def on(self, server: int | np.ndarray, q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
        """Returns [K, N] work of tasks; ``server`` is one server for all tasks, or [N] servers."""
        if self.of_server is None:
            return self.costs[0].per_direction(self.direction, q_rows, kv_rows)
        if isinstance(server, np.ndarray):
            return seconds_on(self.costs, self.of_server[server], self.direction, q_rows, kv_rows)
        return self.costs[self.of_server[server]].per_direction(self.direction, q_rows, kv_rows)

    def of_few(self, start: Sequence[float], stop: Sequence[float], servers: int | Sequence[int]) -> list[list[float]]:
        """Returns [K][N] work of query ranges [start, stop); ``servers`` is one server for all, or [N] servers."""
        rows = [b - a for a, b in zip(start, stop, strict=True)]
        if self.of_server is None:
            return self.costs[0].of_few(self.direction, rows, stop)
        if isinstance(servers, int):
            return self.costs[self.of_server[servers]].of_few(self.direction, rows, stop)
        tables = self.of_server.take(servers).tolist()
        if tables.count(tables[0]) == len(tables):
            return self.costs[tables[0]].of_few(self.direction, rows, stop)
        found = [[0.0] * len(rows) for _ in range(2 if self.direction == "both" else 1)]
        for number in dict.fromkeys(tables):
            some = [at for at, table in enumerate(tables) if table == number]
            seconds = self.costs[number].of_few(self.direction, [rows[at] for at in some], [stop[at] for at in some])
            for into, own in zip(found, seconds, strict=True):
                for at, one in zip(some, own, strict=True):
                    into[at] = one
        return found


def seconds_on(
    tables: Sequence[CostModel], number: np.ndarray, direction: Direction, q_rows: np.ndarray, kv_rows: np.ndarray
) -> np.ndarray:
    """Returns [K, N] seconds of tasks; tables[number[n]] gives the seconds of task n."""
    found = np.zeros((2 if direction == "both" else 1, len(q_rows)))
    for each in np.unique(number).tolist():
        some = number == each
        found[:, some] = tables[each].per_direction(direction, q_rows[some], kv_rows[some])
    return found
