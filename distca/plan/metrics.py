"""The effects of a plan: seconds of each server, rows that travel and memory for them, and a limit that no plan can
beat.

The *home* of a row is the rank that holds it. A *server* is a rank that computes attention; a *task* is a range of
query rows of one document on one server. A *gateway* is a server that received key/value rows from another node, and
hands them on inside its own. Placement, step records, the simulator and ``distca plan`` call this file.

Array legend: R ranks, P pairs of ranks, K kinds of attention layers, N ranges of rows. Rows are int64, seconds float64.
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
"""The least memory for received rows, in GiB. If a rank has few tokens, plans are uneven, and 4.5 times its tokens may
not suffice."""


@dataclass(frozen=True)
class PairRows:
    """The rows that travel between each pair of ranks; only pairs that exchange rows are listed, sorted. All arrays are
    int64.

    Attributes:
        ranks: R.
        home: [P] the rank that sends: a home, or a gateway.
        server: [P] another rank, which receives them.
        rows: [P] rows of each pair, at least 1.
    """

    ranks: int
    home: np.ndarray
    server: np.ndarray
    rows: np.ndarray

    @property
    def total(self) -> int:
        """Returns the rows of all pairs together."""
        return int(self.rows.sum())

    @property
    def sent(self) -> np.ndarray:
        """Returns [R] int64 rows that leave every rank."""
        return np.bincount(self.home, self.rows, self.ranks).astype(np.int64)

    @property
    def received(self) -> np.ndarray:
        """Returns [R] int64 rows that reach every rank."""
        return np.bincount(self.server, self.rows, self.ranks).astype(np.int64)

    def between(self, group: np.ndarray) -> PairRows:
        """Returns the pairs whose ranks are in different groups; ``group`` [R] is the group of every rank."""
        far = group[self.home] != group[self.server]
        return PairRows(self.ranks, self.home[far], self.server[far], self.rows[far])


@dataclass(frozen=True)
class Traffic:
    """The rows that travel between ranks for one plan, on the way to servers.

    Attributes:
        q: query rows from homes to servers.
        kv: key/value rows from homes to servers.
        relay: key/value rows that a gateway hands on to other servers of its node; these do not get them from home.
    """

    q: PairRows
    kv: PairRows
    relay: PairRows

    @property
    def q_rows(self) -> int:
        """Returns the query rows that travel."""
        return self.q.total

    @property
    def kv_rows(self) -> int:
        """Returns the key/value rows that travel, with those that gateways hand on: every server gets a row once."""
        return self.kv.total + self.relay.total

    def between(self, group: np.ndarray) -> Traffic:
        """Returns the rows between ranks of different groups; ``group`` [R] is the group of every rank."""
        return Traffic(self.q.between(group), self.kv.between(group), self.relay.between(group))

    def busiest(self, q_out: int, q_back: int, kv_out: int) -> np.ndarray:
        """Returns [R] int64 bytes that every rank sends or receives, whichever is more, until results are back home.

        A query row takes ``q_out`` bytes to the server and ``q_back`` home; a key/value row takes ``kv_out`` to the
        server."""
        kv_sent, kv_received = self.kv.sent + self.relay.sent, self.kv.received + self.relay.received
        sent = self.q.sent * q_out + self.q.received * q_back + kv_sent * kv_out
        received = self.q.received * q_out + self.q.sent * q_back + kv_received * kv_out
        return np.asarray(np.maximum(sent, received))


def server_seconds(plan: Plan, cost: CostModel | Sequence[CostModel], direction: Direction) -> np.ndarray:
    """Returns [R] attention seconds of every server; "both" adds forward and backward.

    ``cost`` is a cost model for all kinds of layers, or a sequence with one for each kind."""
    costs = cost if isinstance(cost, Sequence) else (cost,)
    return np.asarray(seconds_by_kind(plan, costs, direction).sum(axis=0))


def seconds_by_kind(plan: Plan, costs: Sequence[CostModel], direction: Direction) -> np.ndarray:
    """Returns [K, R] attention seconds of every server, by kind of layer; with a single cost, [1, R] of all tasks."""
    tasks, ranks = plan.tasks, plan.layout.ranks
    found = np.zeros((len(costs), ranks))
    for number, cost in enumerate(costs):
        some = tasks if len(costs) == 1 else tasks.take(plan.kind_of_task == number)
        seconds = cost.on_servers(direction, some.stop - some.start, some.stop, some.server).sum(axis=0)
        found[number] = np.bincount(some.server, weights=seconds, minlength=ranks)
    return found


def context_rows(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Returns two [R] int64 numbers of k,v rows on each server: the rows in its buffer, and the rows of its tasks'
    copies.

    Copies are made if tasks read the same rows, or rows from the previous nano-batch; else the second number is 0."""
    tasks, contexts, ranks = plan.tasks, plan.contexts, plan.layout.ranks
    kept = np.bincount(contexts.last.server, contexts.rows, ranks).astype(np.int64)
    regions = np.bincount(tasks.server, plan.region_rows, ranks).astype(np.int64)
    return kept, np.where(regions > kept, regions, 0)


def imbalance(seconds: np.ndarray) -> float:
    """Returns the slowest of [R] ``seconds`` over their mean; 1 if there is no work at all."""
    mean = float(seconds.mean())
    return float(seconds.max()) / mean if mean > 0 else 1.0


def traffic(plan: Plan, links: Links | None = None) -> Traffic:
    """Returns the rows that travel for ``plan``.

    Rows that a server holds as a home, or from the previous nano-batch, do not travel. A document's k,v rows travel to
    a server once, however many of its tasks read them.

    Args:
        plan: over R ranks.
        links: which ranks share a node; k,v rows then travel once to each node, and on inside it. None if all ranks
            share one.
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
    # A pair becomes one number, home * ranks + server. Rows with equal numbers are added.
    away = np.flatnonzero(home != server)
    pair, rows = (home * ranks + server)[away], rows[away]
    order = order_by(pair)
    pair = pair[order]
    heads = np.flatnonzero(np.append(True, pair[1:] != pair[:-1])[: len(pair)])
    total = np.add.reduceat(rows[order], heads) if len(heads) else rows
    home, server = np.divmod(pair[heads], ranks)
    return PairRows(ranks, home, server, total)


def makespan_bound(layout: Layout, cost: CostModel, direction: Direction) -> float:
    """Returns the seconds that the slowest server needs at least, whatever the plan.

    It is the larger of two bounds. One is the least time of all work, if servers share it by their speed. The other is
    the time of the last query row of the longest document, which one server must compute. For "both" it is the sum of
    both directions' bounds.

    Args:
        layout: the nano-batch.
        cost: seconds per task.
        direction: forward, backward or both.
    """
    # By cost table and direction: "work" is the seconds of all documents on one server, "row" those of the dearest last
    # row. In a second a server does the fraction 1/work of everything; "speed" is the sum over all servers.
    some = layout.last > layout.first
    first, last = layout.first[some], layout.last[some]
    tables, of_server = (cost.tables, cost.of_server) if isinstance(cost, PoolCost) else ((cost,), (0,) * layout.ranks)
    work = np.stack([table.least(direction, last - first, last).sum(axis=1) for table in tables])
    row = np.stack([table.least(direction, np.ones_like(last), last).max(axis=1, initial=0.0) for table in tables])
    speed = (np.bincount(of_server, minlength=len(tables))[:, None] / np.maximum(work, 1e-300)).sum(axis=0)
    return float(np.maximum(np.where(work[0] > 0, 1 / speed, 0.0), row.min(axis=0)).sum())


def receive_buffer_gb(shape: AttentionShape, tokens: int, *, resend: bool, sinks: bool = False) -> float:
    """Returns the GiB of memory in which received rows land.

    At any time two exchanges are under way, each with up to the rows of a nano-batch that the busiest rank receives.
    There is room for the q, k and v rows of 4.5 times a rank's tokens, or 5 times with ``resend``. Real plans without
    pipeline stages fit into it. Tests hold this for two mixes of documents with long contexts, on 2 to 16 ranks, also
    on nodes of 4 and of 8 (tests/plan/test_receive_buffer.py). The states that Qwen3.5's recurrent layers exchange
    there take less than half the room of its attention. They do so, too, if a document of 2M tokens lies on 128 ranks.

    Args:
        shape: heads of one rank.
        tokens: tokens of a micro-batch per rank.
        resend: whether backward sends q, k, v and o again, with dO.
        sinks: whether o comes home with lse, the log-sum-exp of its scores. It goes out again with dO, also without
            ``resend``.
    """
    rows = (5.0 if resend else 4.5) * tokens
    lse = 4 * shape.heads if sinks and not resend else 0
    return max(rows * (shape.q_bytes + shape.kv_bytes + lse) / 2**30, _LEAST_GB)
