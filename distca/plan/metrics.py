"""Figures of a plan: seconds of each rank, rows that travel, and memory. A plan says where attention is computed.

- A *nano-batch* is a whole micro-batch, or one of its two parts. Each nano-batch has a plan.
- A *row* is one token's q, or its k and v. The *home* of a row is the rank that computes the token's linear layers.
- A *server* is a rank that computes attention. A *task* is a range of query rows of one document on one server.
- A *gateway* is a server that receives key/value rows from another node, and sends them on to servers of its own node.

R ranks, P pairs of ranks, K kinds of layers (such as with and without a window). Rows are int64, seconds float64.
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
"""The least result of :func:`receive_buffer_gb`, in GiB. With few tokens per rank, a rank may receive more rows per
token than that function counts."""


@dataclass(frozen=True)
class PairRows:
    """The rows that travel, for each pair of ranks with at least one row, sorted by ``home`` and then ``server``.

    Attributes:
        ranks: number of ranks, R.
        home: [P] rank that sends (a home or a gateway).
        server: [P] rank that receives.
        rows: [P] number of rows.
    """

    ranks: int
    home: np.ndarray
    server: np.ndarray
    rows: np.ndarray

    @property
    def total(self) -> int:
        return int(self.rows.sum())

    @property
    def sent(self) -> np.ndarray:
        """Returns [R] int64 number of rows that each rank sends."""
        return np.bincount(self.home, self.rows, self.ranks).astype(np.int64)

    @property
    def received(self) -> np.ndarray:
        """Returns [R] int64 number of rows that each rank receives."""
        return np.bincount(self.server, self.rows, self.ranks).astype(np.int64)

    def between(self, group: np.ndarray) -> PairRows:
        """Returns the pairs of ranks in different groups; ``group`` [R] numbers each rank's group, such as its node."""
        far = group[self.home] != group[self.server]
        return PairRows(self.ranks, self.home[far], self.server[far], self.rows[far])


@dataclass(frozen=True)
class Traffic:
    """The rows that travel to servers for one plan.

    Attributes:
        q: query rows from homes.
        kv: key/value rows from homes.
        relay: key/value rows from gateways.
    """

    q: PairRows
    kv: PairRows
    relay: PairRows

    @property
    def q_rows(self) -> int:
        return self.q.total

    @property
    def kv_rows(self) -> int:
        return self.kv.total + self.relay.total

    def between(self, group: np.ndarray) -> Traffic:
        """Like :meth:`PairRows.between`."""
        return Traffic(self.q.between(group), self.kv.between(group), self.relay.between(group))

    def busiest(self, q_out: int, q_back: int, kv_out: int, kv_back: int = 0) -> np.ndarray:
        """Returns [R] int64 bytes that each rank sends or receives, whichever are more.

        Args:
            q_out: bytes of a query row to the server.
            q_back: bytes of a query row's result to its home.
            kv_out: bytes of a key/value row to the server.
            kv_back: bytes of a key/value row's gradient to its home.
        """
        kv_sent, kv_received = self.kv.sent + self.relay.sent, self.kv.received + self.relay.received
        sent = self.q.sent * q_out + self.q.received * q_back + kv_sent * kv_out + kv_received * kv_back
        received = self.q.received * q_out + self.q.sent * q_back + kv_received * kv_out + kv_sent * kv_back
        return np.asarray(np.maximum(sent, received))


def server_seconds(plan: Plan, cost: CostModel | Sequence[CostModel], direction: Direction) -> np.ndarray:
    """Returns [R] seconds that each server needs for its tasks in one layer; "both" adds forward and backward.

    ``cost`` is one cost model for all tasks, or one for each kind of layer."""
    costs = cost if isinstance(cost, Sequence) else (cost,)
    return np.asarray(seconds_by_kind(plan, costs, direction).sum(axis=0))


def seconds_by_kind(plan: Plan, costs: Sequence[CostModel], direction: Direction) -> np.ndarray:
    """Returns [K, R] seconds that each server needs, in one layer, for its tasks of each kind.

    ``costs`` has K cost models. A single cost model is for the tasks of all kinds; the result is then [1, R]."""
    tasks, ranks = plan.tasks, plan.layout.ranks
    found = np.zeros((len(costs), ranks))
    for number, cost in enumerate(costs):
        some = tasks if len(costs) == 1 else tasks.take(plan.kind_of_task == number)
        seconds = cost.on_servers(direction, some.stop - some.start, some.stop, some.server).sum(axis=0)
        found[number] = np.bincount(some.server, weights=seconds, minlength=ranks)
    return found


def context_rows(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Returns two [R] arrays: k,v rows in each server's buffer, and k,v rows that the server copies for its tasks.

    A server copies 0 rows unless its tasks share rows, or need rows from the previous nano-batch."""
    # A kernel reads a *region* of k,v rows for each task. If a server's regions have more rows in total than its
    # buffer, the server copies all of them.
    tasks, contexts, ranks = plan.tasks, plan.contexts, plan.layout.ranks
    kept = np.bincount(contexts.last.server, contexts.rows, ranks).astype(np.int64)
    regions = np.bincount(tasks.server, plan.region_rows, ranks).astype(np.int64)
    return kept, np.where(regions > kept, regions, 0)


def imbalance(seconds: np.ndarray) -> float:
    """Returns the largest of [R] ``seconds``, divided by their mean; 1 if all are 0."""
    mean = float(seconds.mean())
    return float(seconds.max()) / mean if mean > 0 else 1.0


def traffic(plan: Plan, links: Links | None = None) -> Traffic:
    """Returns the rows that travel for ``plan``. A k,v row travels to a server once, however many tasks read it.

    ``links`` says which ranks share a node, so that gateways can be chosen; None if all share one node."""
    ranks, reads = plan.layout.ranks, plan.q_reads
    q = pair_rows(reads.home, reads.server, reads.rows, ranks)
    reads = plan.kv_reads
    from_home, handed_on, by = reads.in_hops(links, ranks)
    home, server, rows = reads.home, reads.server, reads.rows
    kv = pair_rows(home[from_home], server[from_home], rows[from_home], ranks)
    return Traffic(q, kv, pair_rows(server[by], server[handed_on], rows[handed_on], ranks))


def pair_rows(home: np.ndarray, server: np.ndarray, rows: np.ndarray, ranks: int) -> PairRows:
    """Adds up [N] ``rows`` for each pair of ``home`` and ``server``; rows that stay on their rank are left out."""
    away = np.flatnonzero(home != server)
    pair, rows = (home * ranks + server)[away], rows[away]
    order = order_by(pair)
    pair = pair[order]
    heads = np.flatnonzero(np.append(True, pair[1:] != pair[:-1])[: len(pair)])
    total = np.add.reduceat(rows[order], heads) if len(heads) else rows
    home, server = np.divmod(pair[heads], ranks)
    return PairRows(ranks, home, server, total)


def makespan_bound(layout: Layout, cost: CostModel, direction: Direction) -> float:
    """Returns a lower bound on the slowest server's seconds, which no plan for ``layout`` can beat.

    The result is the larger one of :func:`makespan_bounds`. For "both" the bounds of forward and backward are
    added, because each direction has a slowest server of its own. One server's forward and backward together may take
    less than this sum.
    """
    return float(np.maximum(*makespan_bounds(layout, cost, direction)).sum())


def makespan_bounds(layout: Layout, cost: CostModel, direction: Direction) -> tuple[np.ndarray, np.ndarray]:
    """Returns two lower bounds on the slowest server's seconds, each of shape [1], or for "both" [2].

    The first is the seconds if all servers end at the same time. The second is the seconds in which the fastest server
    computes the costliest query row.
    """
    # A table is the cost model of some servers, or of none. work [tables, directions]: seconds in which one such server
    # computes all documents. row [tables, directions]: its seconds for the costliest row. speed [directions]: how many
    # times in a second all R servers together compute all documents.
    some = layout.last > layout.first
    first, last = layout.first[some], layout.last[some]
    tables, of_server = (cost.tables, cost.of_server) if isinstance(cost, PoolCost) else ((cost,), (0,) * layout.ranks)
    work = np.stack([table.least(direction, last - first, last).sum(axis=1) for table in tables])
    row = np.stack([table.least(direction, np.ones_like(last), last).max(axis=1, initial=0.0) for table in tables])
    speed = (np.bincount(of_server, minlength=len(tables))[:, None] / np.maximum(work, 1e-300)).sum(axis=0)
    return np.where(work[0] > 0, 1 / speed, 0.0), row[np.unique(of_server)].min(axis=0)


def receive_buffer_gb(shape: AttentionShape, tokens: int, *, resend: bool, sinks: bool = False) -> float:
    """Returns the GiB of the memory into which NVSHMEM writes the rows that a rank receives.

    The memory holds q, k and v of 4.5 · ``tokens`` tokens, or with ``resend`` of 5 · ``tokens``. An exchange that does
    not fit goes by another transport, or is refused. These amounts suffice for the plans of
    tests/plan/test_receive_buffer.py, which have no pipeline stages.

    Args:
        shape: heads of one tensor-parallel rank.
        tokens: tokens of a micro-batch per rank.
        resend: whether backward sends q, k, v and o to servers too, beside dO.
        sinks: whether heads have learned scores in the softmax. Then log-sum-exps need memory too. With ``resend`` they
            always travel, and 5 · ``tokens`` leave enough room for them.
    """
    rows = (5.0 if resend else 4.5) * tokens
    lse = 4 * shape.heads if sinks and not resend else 0
    return max(rows * (shape.q_bytes + shape.kv_bytes + lse) / 2**30, _LEAST_GB)
