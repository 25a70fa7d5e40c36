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
        self._span = int(self._stop.max(initial=0)) + 1
        self._at = key * self._span + self._start
        self._before = np.concatenate(([0], np.cumsum(self._stop - self._start)))

    def below(self, document: np.ndarray | int, group: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Rows of ``document`` before ``position`` that ``group`` holds; arguments broadcast."""
        if not len(self._at):
            return np.zeros(np.broadcast_shapes(np.shape(document), np.shape(group), np.shape(position)), np.int64)
        key = (document * self._groups + group) * self._span
        first = self._at.searchsorted(key)
        last = self._at.searchsorted(key + np.minimum(position, self._span - 1)) - 1
        some = last >= first
        at = np.maximum(last, 0)
        held = self._before[at] - self._before[first] + np.minimum(position, self._stop[at]) - self._start[at]
        return np.where(some, held, 0)
