"""What a byte costs between two ranks, and which rows of a document a rank or a node already holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.errors import PlanError
from distca.plan.layout import Shards


@dataclass(frozen=True)
class Links:
    """Price of a byte between two ranks, relative to one that stays inside a node.

    Attributes:
        ranks_per_node: consecutive ranks that share NVLink; 0 when all ranks do.
        network_price: price of a byte between nodes (default: 360 GB/s NVLink over 50 GB/s network per H200).
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

    def may_relay(self, ranks: int) -> bool:
        """Whether rows may take two hops: there are several nodes, of several ranks."""
        return 1 < self.ranks_per_node < ranks


class HeldRows:
    """Which rows of every document ranks and nodes hold.

    Args:
        shards: home rows, which cover a document up to its last row.
        node: [R] node of every rank.
    """

    def __init__(self, shards: Shards, node: np.ndarray) -> None:
        self._shards, self._node = shards, node
        # In the type of the positions that are asked for: numpy takes twice as long where types are mixed.
        self._start, self._stop = shards.start.astype(np.float64), shards.stop.astype(np.float64)

    def missing(self, document: int, ranks: np.ndarray, stops: np.ndarray, between_nodes: float = 1.0) -> np.ndarray:
        """[G] rows of ``document`` before ``stops`` [G, N], none behind its last row, that others than ``ranks`` [N]
        hold, all of these together; those that other nodes hold count ``between_nodes``."""
        some = slice(*self._shards.document.searchsorted((document, document + 1)).tolist())
        home = self._shards.rank[some]
        held = np.minimum(stops[:, :, None], self._stop[some]) - self._start[some]
        near = self._node.take(home) == self._node.take(ranks)[:, None]
        saves = (home == ranks[:, None]) + (between_nodes - 1) * near
        own = np.maximum(held, 0).reshape(len(stops), -1) @ saves.ravel()
        return np.asarray(between_nodes * stops.sum(axis=1) - own)
