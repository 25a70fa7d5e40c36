"""The state of one scheduling run: each server's load, the ranges that it computes, and the k,v rows that it reads.

- A *server* is a rank that computes attention. The *home* of a row is the rank that holds the row.
- A *piece* is a range of query rows of one document on one server. ``balancer.py`` moves pieces to other servers.
- A server's *load* is the attention that it has to compute. Its *target* is the load that it should have, and its
  *limit* is a little above the target. The three are in seconds; if servers are not equally fast, in seconds of a
  server of mean speed.

Array legend: K directions (forward, backward, or both), R ranks, P pieces, M ranges that move, N chosen ranks.
Constants were compared with other values: ``benchmarks/planner_constants.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from distca.plan.cost.pool import ServerWork
from distca.plan.layout import Shards
from distca.plan.network import Links
from distca.plan.plan import Plan
from distca.plan.scheduler.target_load import TargetLoad
from distca.plan.sorting import order_by
from distca.plan.tasks import Tasks

_MOST_KEPT = 1.5
"""The most k,v rows that a server should read, as a multiple of the mean per server before any work moves. These rows
take memory. A server that would read more gets cut ranges only if no other server can take one. For whole pieces there
is no such limit. If servers are not equally fast, the mean is over the ranks that hold rows: servers without a model
would lower it."""
_FEW_KEPT = 6
"""The limit that ``_MOST_KEPT`` sets is at least this many times the mean number of query rows per server."""


class Pieces(NamedTuple):
    """Query ranges that one server computes.

    Attributes:
        place: [3, P] int64 document, first row and one past the last row.
        seconds: [K, P] float64 seconds.
    """

    place: np.ndarray
    seconds: np.ndarray

    def __len__(self) -> int:
        return self.place.shape[1]

    @property
    def rows(self) -> np.ndarray:
        return np.asarray(self.place[2] - self.place[1])

    def shortest(self, most: int) -> np.ndarray:
        """Returns the indices of the ``most`` shortest pieces, or of all pieces if there are no more than ``most``.

        If there are more, only one is returned of several pieces with equally many rows and the same stop."""
        if len(self) <= most:
            return np.arange(len(self))
        rows, stop = self.rows, self.place[2]
        return np.unique(rows * (int(stop.max()) + 1) + stop, return_index=True)[1][:most]

    def take(self, chosen: np.ndarray | list[int]) -> Pieces:
        return Pieces(self.place.take(chosen, axis=1), self.seconds.take(chosen, axis=1))


class MovedRanges(NamedTuple):
    """The ranges that leave a sender in one move.

    Attributes:
        start, stop: [M] first query row of each range, and one past the last.
        receiver: [M] server that gets the range.
        seconds: [K][M] seconds on the receiver.
    """

    document: list[int]
    start: list[int]
    stop: list[int]
    receiver: list[int]
    seconds: list[list[float]]


class HeldRows:
    """Counts the k,v rows that must travel if each rank holds only the rows that it is the home of.

    Args:
        shards: ranges of documents with their home ranks; they cover every document from row 0 on.
        node: [R] node of every rank.
    """

    def __init__(self, shards: Shards, node: np.ndarray) -> None:
        self._shards, self._node = shards, node
        self._start, self._stop = shards.start.astype(np.float64), shards.stop.astype(np.float64)

    def missing(self, document: int, ranks: np.ndarray, stops: np.ndarray, between_nodes: float = 1.0) -> np.ndarray:
        """Returns [G] rows that must travel so that each of the ``ranks`` can read the document up to its stop.

        Example: a document has rows [0, 4) on rank 0 and [4, 8) on rank 1. If rank 1 reads up to stop 6, 4 rows travel.

        Args:
            ranks: [N] ranks that read the document.
            stops: [G, N] for each of G cases, one past the last row that each rank reads; at most the document's rows.
            between_nodes: how much a row from another node counts; a row from the same node counts 1.
        """
        # "held" [G, N, shards] is the number of rows of each shard before each stop. Each row counts ``between_nodes``,
        # minus "saves" [N, shards]. So a rank's own rows count 0, and rows from other ranks of its node count 1.
        some = slice(*self._shards.document.searchsorted((document, document + 1)).tolist())
        home = self._shards.rank[some]
        held = np.minimum(stops[:, :, None], self._stop[some]) - self._start[some]
        near = self._node.take(home) == self._node.take(ranks)[:, None]
        saves = (home == ranks[:, None]) + (between_nodes - 1) * near
        saved = (np.maximum(held, 0) * saves).reshape(len(stops), -1).sum(axis=1)
        return np.asarray(between_nodes * stops.sum(axis=1) - saved)


class SchedulerState:
    """All servers while work moves.

    Args:
        first: the plan to begin with: all rows computed at home, or the plan of an earlier run.
        work: gives the seconds of a range on every server.
        target: gives the targets of all servers for a mean load.
        tolerance: the seconds that a server at its limit takes beyond its target, as a part of the mean load.
        links: which ranks share a node, and how much more a row costs between nodes.
        expected: [K] mean load after cuts, which add work. Limits are computed from it if the mean load is smaller.

    Attributes:
        load, mean: [K, R] load of every server, and [K] mean load.
        order: [R] ranks, sorted by the first row that they compute in ``first``. Of equally good ranks, callers must
            take the first in this order, so that a plan does not depend on how ranks are numbered.
        most_kept: [R] upper bound of the k,v rows that each server reads. It counts rows of ranges that left the
            server, too.
        kept_limit: the limit on ``most_kept`` (``_MOST_KEPT``).
        grew_by_joining: whether :meth:`joined` made the load of any server larger.
    """

    def __init__(
        self,
        first: Plan,
        work: ServerWork,
        target: TargetLoad,
        *,
        tolerance: float,
        links: Links,
        expected: np.ndarray | None = None,
    ) -> None:
        layout = self.layout = first.layout
        self.links = links
        self.work, self._target, self.grew_by_joining = work, target, False
        tasks = self._first = first.tasks
        self._place = np.array((tasks.document, tasks.start, tasks.stop))
        self._bounds = np.searchsorted(tasks.server, np.arange(layout.ranks + 1))
        self._seconds = work.on(tasks.server, tasks.stop - tasks.start, tasks.stop)
        self.load = np.stack([np.bincount(tasks.server, s, layout.ranks) for s in self._seconds])
        self.tolerance = tolerance
        self.mean = self.load.sum(axis=1) / layout.ranks
        self.expected = np.zeros_like(self.mean) if expected is None else expected
        self.order = _canonical_order(tasks, self._bounds)
        self.node = links.nodes(layout.ranks)
        self._held = HeldRows(layout.kv, self.node)
        last = tasks.take(tasks.last_on_server)
        self.most_kept = np.bincount(last.server, last.stop, layout.ranks)
        counted = layout.ranks if work.slowness is None else max(int(np.count_nonzero(layout.q_rows)), 1)
        self.kept_limit = max(_MOST_KEPT * float(self.most_kept.sum() / counted), _FEW_KEPT * layout.tokens / counted)
        self._readers = _readers_of_cut_documents(last)
        self._first_servers = {document: list(readers) for document, readers in self._readers.items()}
        self._pieces: dict[int, Pieces] = {}
        self._moved: tuple[list[int], list[int], list[int], list[int]] = [], [], [], []

    @property
    def target(self) -> np.ndarray:
        """Returns [K, R] target of every server; [K, 1] if all are equal."""
        return self._target.of(self.mean)

    @property
    def slowest(self) -> np.ndarray:
        """Returns [K] load of the slowest server; if targets differ, the mean load plus the longest time above a
        target."""
        if self._target.alike:
            return np.asarray(self.load.max(axis=1))
        return self.mean + np.asarray(self._above.max(axis=1))

    @property
    def limit(self) -> np.ndarray:
        """Returns [K, R] limit of every server; [K, 1] if all are equal."""
        mean = np.maximum(self.mean, self.expected)
        return self._target.of(mean) + self._target.work_in(self._target.tolerated(mean)[:, None] * self.tolerance)

    @property
    def _above(self) -> np.ndarray:
        """Returns [K, R] seconds that each server takes, at its own speed, for its load above its target."""
        return self._target.seconds_of(self.load - self.target)

    @property
    def over(self) -> float:
        """How far the slowest server is above its target, as a part of the mean load; the largest of all directions."""
        return self.figure(self._mean) - 1

    def figure(self, unit: np.ndarray) -> float:
        """Returns the slowest server's seconds, divided by ``unit`` [K]; the largest of all directions."""
        return float((self.slowest / unit).max())

    def above_target(self, rank: int) -> float:
        """Returns how far ``rank`` is above its target, as a part of the mean load; the largest of all directions."""
        return float((self._above[:, rank] / self._mean).max())

    def most_above_target(self) -> float:
        return float((self._above / self._mean[:, None]).max())

    @property
    def _mean(self) -> np.ndarray:
        return np.maximum(self.mean, 1e-300)

    def pieces_of(self, rank: int) -> Pieces:
        """Returns the pieces that ``rank`` had at the beginning and still has, without those that it received."""
        if rank not in self._pieces:
            mine = slice(*self._bounds[rank : rank + 2].tolist())
            self._pieces[rank] = Pieces(self._place[:, mine], self._seconds[:, mine])
        return self._pieces[rank]

    def on(self, receiver: int, holder: int, pieces: Pieces) -> np.ndarray:
        """Returns [K, P] seconds of ``pieces`` on the server ``receiver``.

        ``pieces.seconds`` must be the seconds on the server ``holder``."""
        if self.work.same(receiver, holder):
            return pieces.seconds
        return self.work.on(receiver, pieces.rows, pieces.place[2])

    def sharers(self, document: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns [N] ranks that read ``document``, and [N] one past the last row that each has read for any range.

        If a single rank computed the whole document at the beginning, the result leaves this rank out. Only this rank
        ever gives parts of the document away, so what it reads itself never matters."""
        readers = self._readers.get(document, {})
        return np.fromiter(readers.keys(), np.int64), np.fromiter(readers.values(), np.float64)

    def may_keep(self, document: int, stop: int) -> np.ndarray:
        """Returns [R] bool, whether a server would read at most ``kept_limit`` rows if it read ``document`` up to
        ``stop`` too. The value of the server that gives the range away means nothing."""
        kept = self.most_kept + stop
        sharing, had = self.sharers(document)
        kept[sharing] -= np.minimum(had, stop)
        return np.asarray(kept <= self.kept_limit)

    def first_servers(self, document: int) -> np.ndarray | None:
        """Returns [N] ranks that computed rows of ``document`` at the beginning, ascending; None if only one did."""
        found = self._first_servers.get(document)
        return None if found is None else np.array(found)

    def kv_rows(self, document: int, ranks: np.ndarray, stops: np.ndarray, between_nodes: float) -> np.ndarray:
        """Returns :meth:`HeldRows.missing`, without rows that a rank reads for other ranges or has read for ranges that
        left it."""
        readers = self._readers.get(document, {})
        had = [readers.get(rank, 0) for rank in ranks.tolist()]
        if not any(had):
            return self._held.missing(document, ranks, stops, between_nodes)
        before = np.array([had], np.float64)
        rows = self._held.missing(document, ranks, np.concatenate((np.maximum(stops, before), before)), between_nodes)
        return rows[:-1] - rows[-1]

    def move(self, sender: int, chosen: list[int], left: Pieces, lost: list[float], moved: MovedRanges) -> None:
        """Updates loads, pieces, and the k,v rows that servers read, for one move.

        Args:
            chosen: indices in :meth:`pieces_of` of the sender's pieces that move, whole or in part.
            left: the parts of these pieces that stay.
            lost: [K] seconds that the sender loses.
        """
        pieces = self.pieces_of(sender)
        more = []
        for load, less, gained in zip(self.load, lost, moved.seconds, strict=True):
            load[sender] -= less
            more.append(sum(gained) - less)
            for receiver, seconds in zip(moved.receiver, gained, strict=True):
                load[receiver] += seconds
        self.mean = self.mean + np.array(more) / self.layout.ranks
        both = Pieces(*(np.concatenate(column, axis=1) for column in zip(pieces, left, strict=True)))
        stays = both.rows > 0
        stays[chosen] = False
        self._pieces[sender] = both.take(np.flatnonzero(stays))
        for column, new in zip(self._moved, moved[:4], strict=True):
            column += new
        more_kept, found = [], self._readers
        for document, stop, receiver in zip(moved.document, moved.stop, moved.receiver, strict=True):
            if document not in found:
                found[document] = {receiver: stop}
                more_kept.append(stop)
                continue
            had = found[document].get(receiver, 0)
            found[document][receiver] = max(had, stop)
            more_kept.append(max(stop - had, 0))
        np.add.at(self.most_kept, moved.receiver, more_kept)

    def joined(self) -> Tasks:
        """Updates loads, and returns all pieces as tasks, in which neighbouring pieces on one server are joined."""
        first = self._first
        if not self._moved[0]:
            return first
        # A server that is not in ``_pieces`` still has all of its pieces.
        changed = np.zeros(self.layout.ranks, bool)
        changed[list(self._pieces)] = True
        untouched = ~changed[first.server]
        left = list(self._pieces.values())
        *moved, receiver = self._moved
        place = np.concatenate((self._place[:, untouched], *(each.place for each in left), moved), axis=1)
        kept_by = np.repeat(list(self._pieces), [len(each) for each in left])
        document, start, stop = place
        tasks = Tasks.sorted(document, start, stop, np.concatenate((first.server[untouched], kept_by, receiver)))
        if len(tasks) < len(document):
            seconds = self.work.on(tasks.server, tasks.stop - tasks.start, tasks.stop)
            load = np.stack([np.bincount(tasks.server, s, self.layout.ranks) for s in seconds])
            self.grew_by_joining = bool((load > self.load * (1 + 1e-9)).any())
            self.load, self.mean = load, load.sum(axis=1) / self.layout.ranks
        return tasks


def _canonical_order(tasks: Tasks, bounds: np.ndarray) -> np.ndarray:
    """Returns [R] ranks sorted by first task, ranks without tasks last; rank r has tasks [bounds[r], bounds[r + 1])."""
    empty = bounds[:-1] == bounds[1:]
    some = np.flatnonzero(~empty)
    first = bounds[some]
    return np.concatenate((some[order_by(tasks.document[first], tasks.start[first])], np.flatnonzero(empty)))


def _readers_of_cut_documents(last: Tasks) -> dict[int, dict[int, int]]:
    """Returns {document: {rank: one past the last row that the rank reads}} for documents with several servers."""
    last = last.take(np.bincount(last.document, minlength=1)[last.document] > 1)
    readers: dict[int, dict[int, int]] = {}
    columns = (last.document, last.server, last.stop)
    for document, rank, stop in zip(*(column.tolist() for column in columns), strict=True):
        readers.setdefault(document, {})[rank] = stop
    return readers
