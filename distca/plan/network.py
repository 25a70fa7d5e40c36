"""Describes the network between ranks: which ranks share a node, and from which rank a server gets each row.

- row: one token's q, or its k and v.
- home of a row: the rank that computes the token's linear layers.
- server: a rank that computes attention.
- task: a range of query rows of one document on one server.
- shard: a range of a document's rows on one home.
- gateway: one server for each node and each shard that the node's servers read from another node. It is the server of
  the node that reads the most rows of the shard.

The home sends k and v to the gateway, which sends them on to the node's other servers. Example: home 0 on node A has a
shard of rows [0, 10). On node B, server 8 reads rows [0, 10) and server 9 reads rows [0, 6). Then server 8 gets 10 rows
from home 0, and server 9 gets 6 rows from server 8. In layers with a window, k and v come *straight* from home, because
a gateway may lack rows that other servers read. q always comes from home.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.errors import PlanError
from distca.plan.layout import Shards, overlaps
from distca.plan.sorting import order_by
from distca.plan.tasks import Tasks

_NVLINK = 360e9
"""A rank sends this number of bytes per second inside a node while it receives as many. Between H200s over NVLink,
about 370e9 were measured for transfers of 64 MiB (benchmarks/results/README.md)."""


@dataclass(frozen=True)
class Links:
    """The nodes of ranks, and the speed of transfers between them.

    Attributes:
        ranks_per_node: consecutive ranks that share a node; 0 if all ranks share one.
        network_price: how many times as long a byte takes between nodes as inside a node; at least 1. The default is
            for H200s with NVLink of 360 GB/s and a network of 50 GB/s.

    Raises:
        PlanError: ``ranks_per_node`` is negative, or ``network_price`` is below 1.
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
        """Returns [ranks] the node of every rank."""
        return np.arange(ranks) // (self.ranks_per_node or ranks)

    def bytes_per_s(self, *, far: bool) -> float:
        """Returns the bytes per second that a rank sends inside a node, or with ``far`` between nodes."""
        return _NVLINK / (self.network_price if far else 1.0)

    def may_relay(self, ranks: int) -> bool:
        """Returns whether there are several nodes of several ranks each, so that there can be gateways."""
        return 1 < self.ranks_per_node < ranks


@dataclass(frozen=True)
class Reads:
    """The rows that servers read, as *pieces*. A piece is the rows of one shard that one reader reads.

    A reader of q is a task. A reader of k and v is a *context*: a range of k,v rows that a server reads once for
    several tasks (``plan.py``). N pieces; arrays are int64 unless noted.

    Attributes:
        task: [N] index of the reader among the ``tasks`` of :meth:`of`.
        shard: [N] index of the shard.
        home: [N] rank that holds the rows.
        server: [N] rank that reads the rows; it may be the home.
        rows: [N] number of rows.
        straight: [N] bool, whether the piece must not come from a gateway; None if every piece may.
    """

    task: np.ndarray
    shard: np.ndarray
    home: np.ndarray
    server: np.ndarray
    rows: np.ndarray
    straight: np.ndarray | None = None

    @staticmethod
    def of(tasks: Tasks, begin: np.ndarray, shards: Shards) -> Reads:
        """Returns the reads of ``tasks``. Task t reads its document's rows [begin[t], tasks.stop[t]).

        For the reads of contexts, ``tasks`` are the last tasks of the contexts, because a context ends with its last
        task."""
        task, shard, rows = overlaps(tasks.document, begin, tasks.stop, shards)
        return Reads(task, shard, shards.rank[shard], tasks.server[task], rows)

    def in_hops(self, links: Links | None, ranks: int) -> tuple[np.ndarray | slice, np.ndarray, np.ndarray]:
        """Returns which pieces come from home, and which come from a gateway.

        A piece that is not ``straight`` must begin with the first row of its shard. Of each shard, a server may have at
        most one piece that is not ``straight``. ``links`` None stands for one node.

        Returns:
            Three arrays of indices of pieces: pieces that come from home; pieces that come from a gateway; and for each
            piece from a gateway, the gateway's own piece.
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
        # Pieces of one shard that one other node reads are a "group". The piece with the most rows is sorted to the
        # group's front, and is the gateway's. If several have the most rows, "turn" prefers another server for each
        # home. With 4 ranks per node, home 2 prefers server 6, home 3 server 7, and home 0 server 4.
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
