"""The state of scheduling: every server's load, pieces, received rows and the k,v rows it already has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distca.plan.balance import traffic
from distca.plan.cost import AttentionShape, CostModel, Direction
from distca.plan.errors import PlanError
from distca.plan.layout import Layout
from distca.plan.links import HeldRows, Links
from distca.plan.moves import Pieces, Ranges
from distca.plan.plan import Plan, Tasks, plan_at_home


class Pool:
    """All servers while work moves. Array legend: K directions, R ranks, P pieces.

    Attributes:
        load: [K, R] seconds.
        limit: [K, R] the most each server may have.
        mean: [K] seconds of a server of speed 1 under a perfect balance of the work as it lies at home.
        order: [R] ranks by the first document they hold, ranks without tokens last; ties are broken in this order, so that
            a plan does not depend on how ranks are numbered.
        shared_documents: per rank, its documents that also live on other ranks.
        homes: per such document, the ranks it lives on.
        node: [R] node of every rank.
        received: [R] bytes of q, k and v rows that arrive at every server; ``cap`` is the most it may be, or None.
    """

    def __init__(
        self,
        layout: Layout,
        cost: CostModel,
        direction: Direction,
        *,
        tolerance: float,
        speeds: Sequence[float] | np.ndarray | None,
        links: Links,
        max_received_bytes: int | None,
    ) -> None:
        self.layout, self.links, self.shape = layout, links, cost.shape
        home = plan_at_home(layout)
        tasks = self._home = home.tasks
        self._bounds = np.searchsorted(tasks.server, np.arange(layout.ranks + 1))
        self._seconds = cost.per_direction(direction, tasks.stop - tasks.start, tasks.stop)
        self.load = np.stack([np.bincount(tasks.server, s, layout.ranks) for s in self._seconds])
        speed = check_speeds(speeds, layout.ranks)
        self.mean = self.load.sum(axis=1) / speed.sum()
        self.limit = (1 + tolerance) * self.mean[:, None] * speed
        self.order = _canonical_order(tasks, layout.ranks)
        self.cap = max_received_bytes
        self.received = _received_at_home(home, cost.shape, max_received_bytes)
        self.node = links.nodes(layout.ranks)
        self._at_rank = HeldRows(layout.kv, layout.kv.rank, layout.ranks)
        self._at_node = HeldRows(layout.kv, self.node[layout.kv.rank], int(self.node[-1]) + 1)
        self.homes, self.shared_documents, self._prefix = _shared(tasks)
        self._pieces: dict[int, Pieces] = {}
        self._moved: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []

    def pieces_of(self, rank: int) -> Pieces:
        """What ``rank`` still computes of its home rows."""
        if rank not in self._pieces:
            mine = slice(self._bounds[rank], self._bounds[rank + 1])
            tasks = self._home
            self._pieces[rank] = Pieces(
                tasks.document[mine], tasks.start[mine], tasks.stop[mine], self._seconds[:, mine]
            )
        return self._pieces[rank]

    def arriving(self, receivers: np.ndarray, pieces: Pieces, ranges: Ranges) -> tuple[np.ndarray, ...]:
        """[3, C, P] k,v rows that a candidate makes travel inside a node and between nodes (a receiver's own rows and
        those it has already fetched are free)."""
        had = np.array([[self._prefix.get(rank, {}).get(d, 0) for d in pieces.document.tolist()] for rank in
                        receivers.tolist()], np.int64)  # fmt: skip
        stop = np.maximum(ranges.stop, had)
        receiver = receivers[:, None]
        ends = np.stack((stop, np.broadcast_to(had, stop.shape)))
        own = self._at_rank.below(pieces.document, receiver, ends)
        near = self._at_node.below(pieces.document, self.node[receiver], ends) if self.links.ranks_per_node else ends
        inside, across = near - own, ends - near
        return inside[0] - inside[1], across[0] - across[1]

    def move(
        self, giver: int, receiver: int, chosen: np.ndarray, start: np.ndarray, stop: np.ndarray, parts: np.ndarray,
        received_bytes: int,
    ) -> None:
        """Hand ranges [start, stop) of the giver's pieces ``chosen`` to ``receiver``.

        Args:
            giver, receiver: ranks.
            chosen: [M] indices of pieces.
            start, stop: [M] ranges inside them.
            parts: [K, 3, M] seconds of the range, of what is left before it and of what is left behind it.
            received_bytes: what arrives at the receiver for them.
        """
        pieces = self.pieces_of(giver)
        document = pieces.document[chosen]
        self._moved.append((document, start, stop, np.full(len(chosen), receiver)))
        self.load[:, giver] -= (pieces.seconds[:, chosen] - parts[:, 1] - parts[:, 2]).sum(axis=1)
        self.load[:, receiver] += parts[:, 0].sum(axis=1)
        kept = np.ones(len(pieces.document), bool)
        kept[chosen] = False
        rest = pieces.take(kept)
        new = Pieces(
            np.concatenate((rest.document, document, document)),
            np.concatenate((rest.start, pieces.start[chosen], stop)),
            np.concatenate((rest.stop, start, pieces.stop[chosen])),
            np.concatenate((rest.seconds, parts[:, 1], parts[:, 2]), axis=1),
        )
        self._pieces[giver] = new.take(new.stop > new.start)
        self.received[receiver] += received_bytes
        prefix = self._prefix.setdefault(receiver, {})
        for d, end in zip(document.tolist(), stop.tolist(), strict=True):
            prefix[d] = max(prefix.get(d, 0), end)

    def tasks(self) -> Tasks:
        """All pieces where they are now."""
        home = self._home
        untouched = ~np.isin(home.server, list(self._pieces))
        columns = [(home.document[untouched], home.start[untouched], home.stop[untouched], home.server[untouched])]
        columns += [
            (p.document, p.start, p.stop, np.full(len(p.document), rank)) for rank, p in self._pieces.items()
        ]
        return Tasks.sorted(*(np.concatenate(column) for column in zip(*columns, *self._moved, strict=True)))


def check_speeds(speeds: Sequence[float] | np.ndarray | None, ranks: int) -> np.ndarray:
    """[R] float64 relative speeds; raises PlanError on a wrong number, a negative one, or none above 0."""
    if speeds is None:
        return np.ones(ranks)
    speed = np.asarray(speeds, np.float64)
    if speed.shape != (ranks,) or not np.isfinite(speed).all() or (speed < 0).any() or not speed.any():
        raise PlanError(f"speeds must be {ranks} numbers of 0 or more, at least one above 0; got {speed.tolist()}.")
    return speed


def _canonical_order(tasks: Tasks, ranks: int) -> np.ndarray:
    first = np.full(ranks, np.iinfo(np.int64).max)
    np.minimum.at(first, tasks.server, np.lexsort((tasks.start, tasks.document)).argsort())
    return np.argsort(first, kind="stable")


def _received_at_home(home: Plan, shape: AttentionShape, cap: int | None) -> np.ndarray:
    """[R] bytes every server receives before anything moves: k,v rows of documents that span ranks."""
    received = traffic(home).kv.sum(axis=0) * shape.kv_bytes
    if cap is not None and received.max(initial=0) > cap:
        rank = int(received.argmax())
        raise PlanError(
            f"Rank {rank} must receive {int(received[rank]):,} bytes of k,v rows for documents that began on other ranks, "
            f"before any balancing; max_received_bytes allows {cap:,}. Raise it or keep documents from spanning ranks."
        )
    return received


def _shared(tasks: Tasks) -> tuple[dict[int, list[int]], dict[int, list[int]], dict[int, dict[int, int]]]:
    """Documents that live on several ranks: their ranks, every rank's such documents, and how far each rank reads them."""
    pair = np.append(True, (tasks.document[1:] != tasks.document[:-1]) | (tasks.server[1:] != tasks.server[:-1]))
    pair = np.flatnonzero(pair[: len(tasks)])
    times = np.bincount(tasks.document[pair], minlength=1)
    pair = pair[times[tasks.document[pair]] > 1]
    homes: dict[int, list[int]] = {}
    documents: dict[int, list[int]] = {}
    prefix: dict[int, dict[int, int]] = {}
    last = np.append(pair[1:], len(tasks)) - 1
    for at, document, rank in zip(last.tolist(), tasks.document[pair].tolist(), tasks.server[pair].tolist(), strict=True):
        homes.setdefault(document, []).append(rank)
        documents.setdefault(rank, []).append(document)
        prefix.setdefault(rank, {})[document] = int(tasks.stop[at])
    return homes, documents, prefix
