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


class HeldRows:
    """Which rows of every document each group (a rank, or a node) holds; answers for many pairs at once.

    Args:
        shards: home rows.
        group: [S] the group that holds each shard.
        groups: number of groups.
    """

    def __init__(self, shards: Shards, group: np.ndarray, groups: int) -> None:
        self._groups = groups
        key = shards.document * groups + group
        order = np.lexsort((shards.start, key))
        key, start, stop = key[order], shards.start[order], shards.stop[order]
        new = np.append(True, (key[1:] != key[:-1]) | (start[1:] != stop[:-1]))[: len(key)]
        heads = np.flatnonzero(new)
        self._start, self._stop = start[heads], stop[np.append(heads[1:], len(key)) - 1] if len(key) else stop
        key = key[heads]
        self._key, self._first, count = np.unique(key, return_index=True, return_counts=True)
        self._count = count
        self._most = int(count.max(initial=0))

    def below(self, document: np.ndarray | int, group: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Rows of ``document`` before ``position`` that ``group`` holds; arguments broadcast."""
        document, group, position = np.broadcast_arrays(document, group, position)
        rows = np.zeros(position.shape, position.dtype)
        if not len(self._key):
            return rows
        key = document * self._groups + group
        found = np.minimum(np.searchsorted(self._key, key), len(self._key) - 1)
        known = self._key[found] == key
        for interval in range(self._most):
            has = known & (self._count[found] > interval)
            at = np.where(has, self._first[found] + interval, 0)
            held = np.minimum(position, self._stop[at]) - self._start[at]
            rows += np.where(has, np.maximum(held, 0), 0)
        return rows
