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
    """Which rows of every document each group (a rank, or a node) holds.

    Plans ask about few documents, many times over, so a document is indexed when it is first asked about.

    Args:
        shards: home rows, which cover a document up to its last row.
        group: [S] the group that holds each shard.
    """

    def __init__(self, shards: Shards, group: np.ndarray) -> None:
        self._shards, self._group = shards, group
        self._found: dict[int, _HeldRanges] = {}

    def below(self, document: int, group: np.ndarray, position: np.ndarray) -> np.ndarray:
        """[..., N] rows of ``document`` before ``position`` [..., N] that ``group`` [N] holds."""
        found = self._found.get(document)
        if found is None:
            low, high = self._shards.document.searchsorted((document, document + 1)).tolist()
            found = _HeldRanges(self._group[low:high], self._shards.start[low:high], self._shards.stop[low:high])
            self._found[document] = found
        return found.below(group, position)


class _HeldRanges:
    """[S] ranges of one document, sorted by start, and the group that holds each."""

    def __init__(self, group: np.ndarray, start: np.ndarray, stop: np.ndarray) -> None:
        self._end = int(stop[-1]) if len(stop) else 0
        self._only = int(group[:1].sum()) if (group[1:] == group[:-1]).all() else None
        if self._only is not None:
            return
        order = group.argsort(kind="stable")
        self._span = self._end + 1
        self._at, self._start, self._stop = (group * self._span + start)[order], start[order], stop[order]
        self._before = np.zeros(len(order) + 1, np.int64)
        np.cumsum(self._stop - self._start, out=self._before[1:])

    def below(self, group: np.ndarray, position: np.ndarray) -> np.ndarray:
        position = np.minimum(position, self._end)
        if self._only is not None:
            return np.asarray((group == self._only) * position)
        key = group * self._span
        first = self._at.searchsorted(key)
        at = self._at.searchsorted(key + position) - 1
        held = self._before[at] - self._before[first] + (np.minimum(position, self._stop[at]) - self._start[at])
        return np.where(at >= first, held, 0)
