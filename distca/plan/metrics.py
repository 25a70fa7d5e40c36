"""The effects of a plan: seconds per server, rows that travel, rows received; and limits that no plan can beat.

Array legend: R ranks, P pairs of them. Rows are int64, seconds float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.plan.cost.model import AttentionShape, CostModel, Direction
from distca.plan.cost.pool import PoolCost
from distca.plan.layout import Layout
from distca.plan.network import Links
from distca.plan.plan import Plan
from distca.plan.sorting import order_by

_LEAST_GB = 0.25
"""The least memory for received rows, in GiB: a few tokens per rank make plans uneven, and this much is always
there."""


@dataclass(frozen=True)
class PairRows:
    """Rows by pair of ranks, sorted, of the pairs that exchange any. Array legend: P pairs; all arrays are int64.

    Attributes:
        ranks: R.
        home: [P] rank that the rows live on, or that hands them on.
        server: [P] another rank, which reads them.
        rows: [P] rows of each pair, at least 1.
    """

    ranks: int
    home: np.ndarray
    server: np.ndarray
    rows: np.ndarray

    @property
    def total(self) -> int:
        """Rows of all pairs."""
        return int(self.rows.sum())

    @property
    def sent(self) -> np.ndarray:
        """[R] int64 rows that leave every rank for others' servers."""
        return np.bincount(self.home, self.rows, self.ranks).astype(np.int64)

    @property
    def received(self) -> np.ndarray:
        """[R] int64 rows that reach every server."""
        return np.bincount(self.server, self.rows, self.ranks).astype(np.int64)

    def between(self, group: np.ndarray) -> PairRows:
        """The pairs whose home rank and server are in different groups; ``group`` [R] has the group of every rank."""
        far = group[self.home] != group[self.server]
        return PairRows(self.ranks, self.home[far], self.server[far], self.rows[far])


@dataclass(frozen=True)
class Traffic:
    """Rows that travel between ranks for one plan, in one direction.

    Attributes:
        q: query rows from home rank to server.
        kv: key/value rows from home rank to server.
        relay: key/value rows that a gateway hands on to a server of its node, which then does not get them from home.
    """

    q: PairRows
    kv: PairRows
    relay: PairRows

    @property
    def q_rows(self) -> int:
        return self.q.total

    @property
    def kv_rows(self) -> int:
        """Key/value rows of both hops together: every server gets a row once."""
        return self.kv.total + self.relay.total

    def between(self, group: np.ndarray) -> Traffic:
        """The rows between ranks of different groups; ``group`` [R] has the group of every rank."""
        return Traffic(self.q.between(group), self.kv.between(group), self.relay.between(group))

    def busiest(self, q_out: int, q_back: int, kv_out: int) -> np.ndarray:
        """[R] int64 bytes that every rank sends or receives, whichever is more.

        A query row takes ``q_out`` bytes to the server and ``q_back`` home; a key/value row takes ``kv_out``."""
        kv_sent, kv_received = self.kv.sent + self.relay.sent, self.kv.received + self.relay.received
        sent = self.q.sent * q_out + self.q.received * q_back + kv_sent * kv_out
        received = self.q.received * q_out + self.q.sent * q_back + kv_received * kv_out
        return np.asarray(np.maximum(sent, received))


def server_seconds(plan: Plan, cost: CostModel | Sequence[CostModel], direction: Direction) -> np.ndarray:
    """[R] attention seconds of every server; "both" adds forward and backward. ``cost`` is for all kinds of layers, or
    a sequence with one for each kind."""
    costs = cost if isinstance(cost, Sequence) else (cost,)
    return np.asarray(seconds_by_kind(plan, costs, direction).sum(axis=0))


def seconds_by_kind(plan: Plan, costs: Sequence[CostModel], direction: Direction) -> np.ndarray:
    """[K, R] attention seconds of every server, by kind; with one cost, of all tasks."""
    tasks, ranks = plan.tasks, plan.layout.ranks
    found = np.zeros((len(costs), ranks))
    for number, cost in enumerate(costs):
        some = tasks if len(costs) == 1 else tasks.take(plan.kind_of_task == number)
        seconds = cost.on_servers(direction, some.stop - some.start, some.stop, some.server).sum(axis=0)
        found[number] = np.bincount(some.server, weights=seconds, minlength=ranks)
    return found


def context_rows(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """[R] int64 k,v rows in every server's buffer, and [R] int64 rows of the copies that its tasks compute with.

    There are copies where tasks share rows, or have some from the nano-batch before; elsewhere they are 0."""
    tasks, contexts, ranks = plan.tasks, plan.contexts, plan.layout.ranks
    kept = np.bincount(contexts.last.server, contexts.rows, ranks).astype(np.int64)
    regions = np.bincount(tasks.server, plan.region_rows, ranks).astype(np.int64)
    return kept, np.where(regions > kept, regions, 0)


def imbalance(seconds: np.ndarray) -> float:
    """The slowest of [R] ``seconds`` over their mean; 1 for no work at all."""
    mean = float(seconds.mean())
    return float(seconds.max()) / mean if mean > 0 else 1.0


def traffic(plan: Plan, links: Links | None = None) -> Traffic:
    """The rows that ``plan`` really moves.

    Rows that a server has, as a home rank or from the nano-batch before, are free. A document's k,v rows travel to a
    server once, however many of its tasks read them.

    Args:
        plan: over R ranks.
        links: which ranks share a node; k,v rows travel once to each node, and on inside it. None where all share one.
    """
    ranks, reads = plan.layout.ranks, plan.q_reads
    q = pair_rows(reads.home, reads.server, reads.rows, ranks)
    reads = plan.kv_reads
    from_home, handed_on, by = reads.in_hops(links, ranks)
    home, server, rows = reads.home, reads.server, reads.rows
    kv = pair_rows(home[from_home], server[from_home], rows[from_home], ranks)
    return Traffic(q, kv, pair_rows(server[by], server[handed_on], rows[handed_on], ranks))


def pair_rows(home: np.ndarray, server: np.ndarray, rows: np.ndarray, ranks: int) -> PairRows:
    """Adds up [N] rows by pair of ranks; rows that stay on their rank are left out."""
    away = np.flatnonzero(home != server)
    pair, rows = (home * ranks + server)[away], rows[away]
    order = order_by(pair)
    pair = pair[order]
    heads = np.flatnonzero(np.append(True, pair[1:] != pair[:-1])[: len(pair)])
    total = np.add.reduceat(rows[order], heads) if len(heads) else rows
    home, server = np.divmod(pair[heads], ranks)
    return PairRows(ranks, home, server, total)


def makespan_bound(layout: Layout, cost: CostModel, direction: Direction) -> float:
    """Seconds that the slowest server needs at least, whatever the plan.

    It is the larger of two bounds: all the work, uncut, spread over the servers by their speed; and the last query row
    of the longest document, which one server must compute. For "both" it is forward's bound plus backward's.

    Args:
        layout: the nano-batch.
        cost: seconds per CA-task.
        direction: forward, backward or both.
    """
    some = layout.last > layout.first
    first, last = layout.first[some], layout.last[some]
    tables, of_server = (cost.tables, cost.of_server) if isinstance(cost, PoolCost) else ((cost,), (0,) * layout.ranks)
    work = np.stack([table.least(direction, last - first, last).sum(axis=1) for table in tables])
    row = np.stack([table.least(direction, np.ones_like(last), last).max(axis=1, initial=0.0) for table in tables])
    speed = (np.bincount(of_server, minlength=len(tables))[:, None] / np.maximum(work, 1e-300)).sum(axis=0)
    return float(np.maximum(np.where(work[0] > 0, 1 / speed, 0.0), row.min(axis=0)).sum())


def receive_buffer_gb(shape: AttentionShape, tokens: int, *, resend: bool, sinks: bool = False) -> float:
    """GiB of memory in which received rows land. Two exchanges are under way at a time, each with up to the rows of a
    nano-batch that the busiest rank receives.

    It is room for the q, k and v rows of 4.5 times a rank's tokens, with ``resend`` 5 times. Real plans without
    pipeline stages fit, of both mixes in their long-context versions. Tests hold that for 2 to 16 ranks, also on nodes
    of 4 and of 8 (tests/plan/test_receive_buffer.py). Summaries of Qwen3.5's recurrent layers take less than half the
    room of its attention there. They do so, too, where a document of 2M tokens lies on 128 ranks.

    Args:
        shape: heads of one rank.
        tokens: tokens of a micro-batch per rank.
        resend: whether backward sends q, k, v and o again, with dO.
        sinks: whether o comes home with its log-sum-exp, which goes out again with dO, also without ``resend``.
    """
    rows = (5.0 if resend else 4.5) * tokens
    lse = 4 * shape.heads if sinks and not resend else 0
    return max(rows * (shape.q_bytes + shape.kv_bytes + lse) / 2**30, _LEAST_GB)
