"""The network between ranks: which share a node, and from whom servers get the rows that they read.

Query rows come straight from home. Keys and values may take two hops: they cross the network once per node, to its
*gateway*, and go on inside the node from there.

Readers of a home shard need its first rows, up to their tasks' ends. So the reader of a node that needs most of them
needs all that the others there need, and is the gateway: they get these rows from its buffer. Example: home 0 on node A
has rows [0, 10). On node B, server 8 needs rows [0, 10) and server 9 rows [0, 6). Server 8 gets 10 rows from home 0,
and server 9 gets its 6 from server 8.

Among readers that need as many rows, the gateway is the one with the home rank's number inside the node, or the next
one. So relays are spread over readers as homes are spread, and rows keep to links between ranks of one number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.errors import PlanError
from distca.plan.layout import Shards, overlaps
from distca.plan.sorting import order_by
from distca.plan.tasks import Tasks

_NVLINK = 360e9
"""Bytes per second that a rank sends, or gets, inside a node; prices of transfers are found from it. It is what an H200
reached over NVLink (benchmarks/results/planner.md)."""


@dataclass(frozen=True)
class Links:
    """The ranks that share a node, and the price of a byte between nodes over that of a byte inside one.

    Attributes:
        ranks_per_node: consecutive ranks that share NVLink; 0 when all ranks do.
        network_price: price of a byte between nodes (default: 360 GB/s of NVLink over 50 GB/s of network per H200).
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
        """[R] node of every rank."""
        return np.arange(ranks) // (self.ranks_per_node or ranks)

    def bytes_per_s(self, *, far: bool) -> float:
        """Bytes per second that a rank sends, and gets at the same time: inside a node, or with ``far`` between
        nodes."""
        return _NVLINK / (self.network_price if far else 1.0)

    def may_relay(self, ranks: int) -> bool:
        """Whether rows may take two hops: there are several nodes of several ranks each."""
        return 1 < self.ranks_per_node < ranks


@dataclass(frozen=True)
class Reads:
    """Pieces of home shards that servers read. Array legend: N pieces; all arrays are int64.

    Attributes:
        task: [N] index of the task that reads the piece.
        shard: [N] number of the home shard.
        home: [N] rank that the rows live on.
        server: [N] rank that reads them; it may be the home rank.
        rows: [N] rows of the piece.
        straight: [N] bool, whether the piece comes from home in any case; None where gateways may hand on all.
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
        """Returns which pieces come from home and which come from a gateway.

        Pieces that are not ``straight`` must be the first rows of their shards, and no two may have both shard and
        server in common.

        Args:
            links: which ranks share a node; rows travel once to each node. None where all share one.
            ranks: R.

        Returns:
            Indices of the pieces that come from home; indices of those that gateways hand on; and for each of the
            latter, the index of the piece that its gateway reads.
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
        # Pieces that cross the network, grouped by (shard, node) and in a group by falling rows, then by ``turn``: how
        # far the server stands behind the home's number. The first of a group is the gateway's, the others are handed
        # on.
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
