"""What a byte costs between two ranks, and which rows of a document a rank or a node already holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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

    Plans ask about few documents, many times over, so a document is indexed when it is first asked about.

    Args:
        shards: home rows, which cover a document up to its last row.
        node: [R] node of every rank.
    """

    def __init__(self, shards: Shards, node: np.ndarray) -> None:
        self._shards, self._node = shards, node
        self._homes: dict[int, np.ndarray] = {}
        self._ranges: dict[int, tuple[_HeldRanges, _HeldRanges]] = {}

    def missing(self, document: int, ranks: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[..., N] rows of ``document`` before ``stops`` [..., N], none behind its last row, that others of the node of
        ``ranks`` [N] hold, and that other nodes hold."""
        homes = self._homes.get(document)
        if homes is None:
            low, high = self._shards.document.searchsorted((document, document + 1)).tolist()
            homes = self._homes[document] = self._shards.rank[low:high]
            if (homes != homes[0]).any():
                where = self._shards.start[low:high], self._shards.stop[low:high]
                self._ranges[document] = _HeldRanges(homes, *where), _HeldRanges(self._node[homes], *where)
        if document not in self._ranges:  # most live on one rank
            near = self._node[ranks] == self._node[homes[0]]
            return stops * (near & (ranks != homes[0])), stops * ~near
        at_rank, at_node = self._ranges[document]
        near = at_node.below(self._node[ranks], stops)
        return near - at_rank.below(ranks, stops), stops - near


class _HeldRanges:
    """[S] ranges of one document, sorted by start, and the group that holds each."""

    def __init__(self, group: np.ndarray, start: np.ndarray, stop: np.ndarray) -> None:
        self._ranges = group, start, stop
        self._groups, self._end = set(group.tolist()), int(stop[-1]) if len(stop) else 0

    @cached_property
    def _index(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Ranges by group: the place in that order, start and stop of each, and the rows before it."""
        group, start, stop = self._ranges
        order = group.argsort(kind="stable")
        group, start, stop = group[order], start[order], stop[order]
        before = np.zeros(len(order) + 1, np.int64)
        np.cumsum(stop - start, out=before[1:])
        return group * (self._end + 1) + start, start, stop, before

    def below(self, group: np.ndarray, position: np.ndarray) -> np.ndarray:
        if self._groups.isdisjoint(group.tolist()):
            return np.zeros_like(position)
        position = np.minimum(position, self._end)
        if len(self._groups) == 1:
            return np.asarray((group == self._ranges[0][0]) * position)
        place, start, stop, before = self._index
        key = group * (self._end + 1)
        first, at = place.searchsorted(key), place.searchsorted(key + position) - 1
        held = before[at] - before[first] + (np.minimum(position, stop[at]) - start[at])
        return np.where(at >= first, held, 0)
