"""The network between ranks: which ranks share a node, and from which rank a server gets each row that it reads.

A *server* is a rank that computes attention; the *home* of a row is the rank that holds it. Query rows come straight
from home. A row of keys and values may take two hops. It crosses the network once to each node, to one server there,
its *gateway*. The gateway hands it on inside the node.

A home rank holds *shards*, ranges of documents. Each server that reads a shard reads its first rows, up to some row. So
the server of a node that reads most of a shard has all rows that the others need, and becomes the gateway. Example:
home 0 on node A has rows [0, 10). On node B, server 8 reads rows [0, 10) and server 9 rows [0, 6). Server 8 gets 10
rows from home 0, and server 9 gets its 6 from server 8.

If several servers of a node read equally many rows, one of them must be chosen. It is the one with the same number
inside its node as the home rank has; if that does not read the shard, the next one that does. So gateways are spread
over ranks as homes are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.errors import PlanError
from distca.plan.layout import Shards, overlaps
from distca.plan.sorting import order_by
from distca.plan.tasks import Tasks

_NVLINK = 360e9
"""Bytes per second that a rank sends, and receives at the same time, inside a node: what an H200 reached over NVLink
(benchmarks/results/planner.md). Plans price transfers with it."""


@dataclass(frozen=True)
class Links:
    """The nodes of ranks, and how much dearer a byte between nodes is than one inside a node.

    Attributes:
        ranks_per_node: consecutive ranks that share a node; 0 if all ranks do.
        network_price: price of a byte between nodes over that inside one. The default is about 360 GB/s of NVLink
            over 50 GB/s of network for each H200.
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
        """Returns the bytes per second that a rank sends, and receives at the same time: inside a node, or with ``far``
        between nodes."""
        return _NVLINK / (self.network_price if far else 1.0)

    def may_relay(self, ranks: int) -> bool:
        """Returns whether rows may take two hops: there are several nodes with several ranks each."""
        return 1 < self.ranks_per_node < ranks


@dataclass(frozen=True)
class Reads:
    """Ranges of home shards that servers read. Array legend: N pieces, each a range of one shard for one task; T tasks.
    All arrays are int64 unless noted.

    Attributes:
        task: [N] index of the task that reads the piece.
        shard: [N] index of the home shard.
        home: [N] rank that holds the rows.
        server: [N] rank that reads them; it may be the home rank.
        rows: [N] rows of the piece.
        straight: [N] bool, whether the piece must come from home; None if gateways may hand on any piece.
    """

    task: np.ndarray
    shard: np.ndarray
    home: np.ndarray
    server: np.ndarray
    rows: np.ndarray
    straight: np.ndarray | None = None

    @staticmethod
    def of(tasks: Tasks, begin: np.ndarray, shards: Shards) -> Reads:
        """Returns the reads of ``tasks``: for each, the rows from its ``begin`` [T] up to its stop."""
        task, shard, rows = overlaps(tasks.document, begin, tasks.stop, shards)
        return Reads(task, shard, shards.rank[shard], tasks.server[task], rows)

    def in_hops(self, links: Links | None, ranks: int) -> tuple[np.ndarray | slice, np.ndarray, np.ndarray]:
        """Returns the pieces that come from home and those that come from a gateway.

        Pieces that are not ``straight`` must be the first rows of their shards, and no two of them may have the same
        shard and server.

        Args:
            links: which ranks share a node; None if all do.
            ranks: R.

        Returns:
            Indices of the pieces that come from home; indices of the pieces that gateways hand on; and for each of the
            latter, the index of the piece with which its gateway got the rows.
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
        # Pieces that cross the network are sorted into groups of one shard and node. In a group those with most rows
        # come first, then those with the least "turn": the distance from the home's number in its node to the server's.
        # The first of a group is the gateway's. The others are handed on.
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
