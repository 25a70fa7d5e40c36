"""The network between ranks: which ranks share a node, and where a server gets each row from.

A *server* is a rank that computes attention; the *home* of a row is the rank that holds the row. Query rows come
straight from home. A row of keys and values may take two hops: it crosses the network once to each node, to one server
called the *gateway*, which hands the row on to other servers of the node.

A home rank holds *shards*, ranges of documents. A server that reads a shard reads the shard's first rows, up to some
row. So the server of a node that reads most of a shard has the rows of all others, and becomes the gateway. Example:
home 0 on node A has rows [0, 10). On node B, server 8 reads rows [0, 10) and server 9 reads rows [0, 6). Then server 8
gets 10 rows from home 0, and server 9 gets 6 rows from server 8.

If several servers read most, the gateway is the server whose number inside its node equals the home rank's, or the next
one. So gateways are spread over ranks as homes are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.errors import PlanError
from distca.plan.layout import Shards, overlaps
from distca.plan.sorting import order_by
from distca.plan.tasks import Tasks

_NVLINK = 360e9
"""Bytes per second that a rank sends, and receives at the same time, inside a node: measured on H200s over NVLink
(benchmarks/results/planner.md)."""


@dataclass(frozen=True)
class Links:
    """The nodes of ranks, and how much a byte between nodes costs, compared with a byte inside a node.

    Attributes:
        ranks_per_node: consecutive ranks that share a node; 0 if all ranks share one.
        network_price: the price of a byte between nodes over the price of a byte inside a node. The default is about
            360 GB/s of NVLink over 50 GB/s of network for each H200.
    """

    ranks_per_node: int = 0
    network_price: float = 7.0

    def __post_init__(self) -> None:
        if self.ranks_per_node < 0 or self.network_price < 1:
            raise PlanError(
                f"ranks_per_node is {self.ranks_per_node} and must be 0 or more; "
                f"network_price is {self.network_price} and must be at least 1."
            )

    def nodes(self, ranks: int) -> np.ndarray:
        """Returns [R] node of every rank."""
        return np.arange(ranks) // (self.ranks_per_node or ranks)

    def bytes_per_s(self, *, far: bool) -> float:
        """Returns the bytes per second that a rank sends, and receives at the same time, inside a node; with ``far``,
        between nodes."""
        return _NVLINK / (self.network_price if far else 1.0)

    def may_relay(self, ranks: int) -> bool:
        """Returns whether rows may take two hops: if there are several nodes with several ranks each."""
        return 1 < self.ranks_per_node < ranks


@dataclass(frozen=True)
class Reads:
    """Ranges of home shards that servers read. Array legend: N pieces, each a range of one shard for one task; T tasks,
    R ranks. Arrays are int64 unless noted.

    Attributes:
        task: [N] index of the task that reads the piece.
        shard: [N] index of the home shard.
        home: [N] rank that holds the rows.
        server: [N] rank that reads the rows; it may be the home rank.
        rows: [N] rows of the piece.
        straight: [N] bool, whether each piece must come from home; None if gateways may hand on any piece.
    """

    task: np.ndarray
    shard: np.ndarray
    home: np.ndarray
    server: np.ndarray
    rows: np.ndarray
    straight: np.ndarray | None = None

    @staticmethod
    def of(tasks: Tasks, begin: np.ndarray, shards: Shards) -> Reads:
        """Returns the reads of ``tasks``: each reads the rows from its ``begin`` [T] up to its stop."""
        task, shard, rows = overlaps(tasks.document, begin, tasks.stop, shards)
        return Reads(task, shard, shards.rank[shard], tasks.server[task], rows)

    def in_hops(self, links: Links | None, ranks: int) -> tuple[np.ndarray | slice, np.ndarray, np.ndarray]:
        """Returns which pieces come from home, and which come from a gateway.

        Pieces that are not ``straight`` must be the first rows of their shards, with a different shard or server each.

        Args:
            links: which ranks share a node; None if all ranks share one.
            ranks: R.

        Returns:
            Three arrays of indices of pieces: pieces that come from home; pieces that gateways hand on; and for each
            piece handed on, the piece with which its gateway got the rows.
        """
        none = np.zeros(0, np.int64)
        if links is None or not links.may_relay(ranks):
            return slice(None), none, none
        node = self.server // links.ranks_per_node
        far = np.flatnonzero(self.home // links.ranks_per_node != node)
        if self.straight is not None:
            far = far[~self.straight[far]]
        if not len(far):
            return slice(None), none, none
        # Pieces that cross the network are sorted into groups of one shard and one node. The first piece of a group is
        # the gateway's: it has most rows, and then the least "turn", the distance from the home's number in its node to
        # the server's. The other pieces are handed on.
        rows, group = self.rows[far], self.shard[far] * (ranks // links.ranks_per_node + 1) + node[far]
        turn = (self.server[far] - self.home[far]) % links.ranks_per_node
        order = order_by(group, rows.max() - rows, turn)
        far, group = far[order], group[order]
        first = np.append(True, group[1:] != group[:-1])
        heads = np.flatnonzero(first)
        gateway = np.repeat(far[heads], np.diff(np.append(heads, len(far))) - 1)
        handed_on = far[np.flatnonzero(~first)]
        from_home = np.ones(len(self.home), bool)
        from_home[handed_on] = False
        return np.flatnonzero(from_home), handed_on, gateway
