"""The state of scheduling: every server's load, pieces, received rows and the k,v rows it already has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distca.errors import PlanError
from distca.plan.cost.model import AttentionShape, CostModel, Direction
from distca.plan.metrics import traffic
from distca.plan.plan import Plan, Tasks
from distca.plan.scheduler.network_cost import HeldRows, Links
from distca.plan.scheduler.target_load import TargetLoad
from distca.plan.sorting import order_by

_MOST_KEPT, _FEW_KEPT = 1.5, 6
"""k,v rows that a server should read at most: over the mean of servers at home, and, where that is more, over the query
rows of a server."""


class Pieces(NamedTuple):
    """Query ranges that one server computes. Arrays: document, start, stop [P] int64; seconds [K, P] float64."""

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    seconds: np.ndarray

    def take(self, chosen: np.ndarray) -> Pieces:
        return Pieces(*(column.take(chosen, axis=-1) for column in self))


@dataclass(frozen=True)
class MovedRanges:
    """Ranges that leave a sender. Arrays: document, start, stop, receiver [M] int64; seconds [K, M] at the receiver."""

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    receiver: np.ndarray
    seconds: np.ndarray

    def __iter__(self) -> Iterator[tuple[int, int, int, int, np.ndarray]]:
        columns = (self.document, self.start, self.stop, self.receiver)
        return zip(*(column.tolist() for column in columns), self.seconds.T, strict=True)


class SchedulerState:
    """All servers while work moves. Array legend: K directions, R ranks, P pieces.

    Attributes:
        load: [K, R] seconds.
        mean: [K] seconds of a server if the work, with what cuts added so far, were spread evenly.
        order: [R] ranks by the first document they hold, ranks without tokens last; ties are broken in this order, so
            that a plan does not depend on how ranks are numbered.
        node: [R] node of every rank.
        received: [R] bytes of q, k and v rows that arrive at every server; ``cap`` is the most it may be, or None.
        kept: [R] k,v rows that every server reads; ``most_kept`` is how many it should at most.
        grew_by_joining: whether a server takes longer since :meth:`joined`.
    """

    def __init__(
        self,
        home: Plan,
        cost: CostModel,
        direction: Direction,
        *,
        tolerance: float,
        other_seconds: Sequence[float] | np.ndarray | None,
        links: Links,
        max_received_bytes: int | None,
    ) -> None:
        layout = self.layout = home.layout
        self.links, self.shape = links, cost.shape
        self._cost, self._direction, self.grew_by_joining = cost, direction, False
        tasks = self._home = home.tasks
        self._bounds = np.searchsorted(tasks.server, np.arange(layout.ranks + 1))
        self._seconds = cost.per_direction(direction, tasks.stop - tasks.start, tasks.stop)
        self.load = np.stack([np.bincount(tasks.server, s, layout.ranks) for s in self._seconds])
        self._target = TargetLoad(layout.ranks, other_seconds)
        self._tolerance = tolerance
        self.mean = self.load.sum(axis=1) / layout.ranks
        self.order = _canonical_order(tasks, self._bounds)
        self.cap = max_received_bytes
        self.received = _received_at_home(home, cost.shape, max_received_bytes)
        self.node = links.nodes(layout.ranks)
        self._held = HeldRows(layout.kv, self.node)
        last = tasks.take(tasks.last_on_server)
        self.kept = np.bincount(last.server, last.stop, layout.ranks)
        self.most_kept = max(_MOST_KEPT * float(self.kept.mean()), _FEW_KEPT * layout.tokens / layout.ranks)
        self._readers = _readers_of_cut_documents(last)
        self._homes = {document: list(readers) for document, readers in self._readers.items()}
        self._pieces: dict[int, Pieces] = {}
        self._moved: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []

    @property
    def target(self) -> np.ndarray:
        """[K, R] seconds of attention that each server should have."""
        return self._target.of(self.mean)

    @property
    def slowest(self) -> np.ndarray:
        """[K] longest time of a server; where servers have other work, the mean and the longest time above a target."""
        if self._target.other_seconds is None:
            return np.asarray(self.load.max(axis=1))
        return self.mean + np.asarray((self.load - self.target).max(axis=1))

    @property
    def limit(self) -> np.ndarray:
        """[K, R] the most each server may have."""
        return self.target + self.mean[:, None] * self._tolerance

    def above_target(self, rank: int) -> float:
        """How far above its target ``rank`` is, as part of the mean, in its worse direction."""
        return float(((self.load[:, rank] - self.target[:, rank]) / np.maximum(self.mean, 1e-300)).max())

    def most_above_target(self) -> float:
        """The same of the server that is furthest above."""
        return float(((self.load - self.target) / np.maximum(self.mean, 1e-300)[:, None]).max())

    def free_bytes(self, ranks: np.ndarray) -> np.ndarray:
        """[N] bytes that ``ranks`` may still receive; infinite without a cap."""
        return np.full(len(ranks), np.inf) if self.cap is None else self.cap - self.received[ranks]

    def pieces_of(self, rank: int) -> Pieces:
        """What ``rank`` still computes of its home rows."""
        if rank not in self._pieces:
            mine = slice(self._bounds[rank], self._bounds[rank + 1])
            tasks = self._home
            self._pieces[rank] = Pieces(
                tasks.document[mine], tasks.start[mine], tasks.stop[mine], self._seconds[:, mine]
            )
        return self._pieces[rank]

    def sharers(self, document: int) -> tuple[np.ndarray, np.ndarray]:
        """[N] ranks, other than a sole home, that already read rows of ``document``, and [N] how far."""
        readers = self._readers.get(document, {})
        return np.fromiter(readers.keys(), np.int64), np.fromiter(readers.values(), np.int64)

    def may_keep(self, document: int, stop: int) -> np.ndarray:
        """[R] whether servers may read ``document`` up to ``stop`` without too many k,v rows."""
        more = np.full(self.layout.ranks, stop)
        sharing, had = self.sharers(document)
        more[sharing] = np.maximum(stop - had, 0)
        return np.asarray(self.kept + more <= self.most_kept)

    def homes(self, document: int) -> np.ndarray | None:
        """[N] home ranks of a document that lives on several, ascending; None for others."""
        homes = self._homes.get(document)
        return None if homes is None else np.array(homes)

    def kv_rows(self, document: int, ranks: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[G, N] k,v rows that must still travel inside a node and between nodes, when ``ranks`` [N] read ``document``
        up to ``stops`` [G, N]. What they hold as home ranks or have fetched already is free."""
        readers = self._readers.get(document, {})
        had = [readers.get(rank, 0) for rank in ranks.tolist()]
        if not any(had):
            if not self.links.ranks_per_node:
                return stops, np.zeros_like(stops)
            return self._held.missing(document, ranks, stops)
        inside, across = self._held.missing(document, ranks, np.concatenate((np.maximum(stops, had), [had])))
        return inside[:-1] - inside[-1], across[:-1] - across[-1]

    def move(self, sender: int, chosen: np.ndarray, left: Pieces, moved: MovedRanges) -> None:
        """Replace the sender's pieces ``chosen`` [M] by what it keeps of them, ``left``; the rest goes as ``moved``
        says."""
        pieces = self.pieces_of(sender)
        lost = pieces.seconds.take(chosen, axis=1).sum(axis=1) - left.seconds.sum(axis=1)
        self.load[:, sender] -= lost
        self.mean = self.mean + (moved.seconds.sum(axis=1) - lost) / self.layout.ranks
        both = Pieces(*(np.concatenate(column, axis=-1) for column in zip(pieces, left, strict=True)))
        some = both.stop > both.start
        some[chosen] = False
        self._pieces[sender] = both.take(some.nonzero()[0])
        self._moved.append((moved.document, moved.start, moved.stop, moved.receiver))
        for document, start, stop, receiver, seconds in moved:
            self.load[:, receiver] += seconds
            readers = self._readers.setdefault(document, {})
            if self.cap is not None:
                inside, across = self.kv_rows(document, np.array([receiver]), np.array([[stop]]))
                rows = int(inside.sum()) + int(across.sum())
                self.received[receiver] += (stop - start) * self.shape.q_bytes + rows * self.shape.kv_bytes
            self.kept[receiver] += max(stop - readers.get(receiver, 0), 0)
            readers[receiver] = max(readers.get(receiver, 0), stop)

    def joined(self) -> Tasks:
        """All pieces where they are now, those that touch joined; their loads then count joined ranges too."""
        home = self._home
        if not self._moved:
            return home
        changed = np.zeros(self.layout.ranks, bool)
        changed[list(self._pieces)] = True
        untouched = ~changed[home.server]
        columns = [(home.document[untouched], home.start[untouched], home.stop[untouched], home.server[untouched])]
        columns += [(p.document, p.start, p.stop, np.full(len(p.document), rank)) for rank, p in self._pieces.items()]
        pieces = [np.concatenate(column) for column in zip(*columns, *self._moved, strict=True)]
        tasks = Tasks.sorted(*pieces)
        if len(tasks) < len(pieces[0]):
            seconds = self._cost.per_direction(self._direction, tasks.stop - tasks.start, tasks.stop)
            load = np.stack([np.bincount(tasks.server, s, self.layout.ranks) for s in seconds])
            self.grew_by_joining = bool((load > self.load * (1 + 1e-9)).any())
            self.load, self.mean = load, load.sum(axis=1) / self.layout.ranks
        return tasks


def _canonical_order(tasks: Tasks, bounds: np.ndarray) -> np.ndarray:
    """[R] ranks by their first task; those of rank r are [bounds[r], bounds[r + 1])."""
    empty = bounds[:-1] == bounds[1:]
    some = np.flatnonzero(~empty)
    first = bounds[some]
    return np.concatenate((some[order_by(tasks.document[first], tasks.start[first])], np.flatnonzero(empty)))


def _received_at_home(home: Plan, shape: AttentionShape, cap: int | None) -> np.ndarray:
    """[R] bytes every server receives before anything moves: k,v rows of documents that span ranks."""
    if cap is None:
        return np.zeros(home.layout.ranks, np.int64)
    moved = traffic(home)
    received: np.ndarray = moved.kv.received * shape.kv_bytes + moved.q.received * shape.q_bytes
    if received.max(initial=0) > cap:
        rank = int(received.argmax())
        raise PlanError(
            f"Rank {rank} must receive {int(received[rank]):,} bytes of k,v rows for documents that began on other "
            f"ranks, before any balancing; max_received_bytes allows {cap:,}. "
            "Raise it or keep documents from spanning ranks."
        )
    return received


def _readers_of_cut_documents(last: Tasks) -> dict[int, dict[int, int]]:
    """For every document that lives on several ranks: those ranks, and how far each reads it at home, of the ``last``
    tasks there."""
    last = last.take(np.bincount(last.document, minlength=1)[last.document] > 1)
    readers: dict[int, dict[int, int]] = {}
    columns = (last.document, last.server, last.stop)
    for document, rank, stop in zip(*(column.tolist() for column in columns), strict=True):
        readers.setdefault(document, {})[rank] = stop
    return readers
