"""Plans: the rank that computes the attention of each query row of a nano-batch, and the k,v rows that ranks need.

- A *nano-batch* is a whole micro-batch, or one of its two parts, *ping* and then *pong*.
- The *home* of a row is the rank that holds the row. A *layout* has the homes of a nano-batch's rows.
- A *shard* is a range of a document's rows on one home.
- A *server* is a rank that computes attention.
- A *task* is a range of query rows of one document on one server.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from distca.errors import PlanError
from distca.plan.geometry import first_key
from distca.plan.layout import Layout
from distca.plan.network import Reads
from distca.plan.sorting import order_by
from distca.plan.tasks import Tasks


@dataclass(frozen=True)
class Contexts:
    """The k,v rows that servers need. Array legend: L contexts, T tasks; arrays are int64.

    A *context* is a range of k,v rows of one document on one server. Tasks with overlapping keys share a context.
    Example: the tasks [2, 4) and [6, 7) read the keys [0, 4) and [0, 7), so they share the context [0, 7). With a
    window of 2 keys they read [1, 4) and [5, 7), which are two contexts.

    Attributes:
        last: the last task of each context; the context ends where this task stops.
        first: [L] first row of each context.
        begin: [L] first row that enters the server's buffer. Rows before it are in the buffer of the nano-batch before.
        at: [L] index of the row ``first`` in the buffer of the nano-batch before; 0 if no row of that buffer is used.
        of_task: [T] index of every task's context.
    """

    last: Tasks
    first: np.ndarray
    begin: np.ndarray
    at: np.ndarray
    of_task: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """Returns [L] number of rows of each context that enter the server's buffer."""
        return self.last.stop - self.begin


@dataclass(frozen=True, eq=False)
class Plan:
    """A layout, and the server of every query row in it. Array legend: D documents, T tasks, L contexts.

    With pipeline stages, a plan has the documents of several stages. The stages may run layers of different *kinds* at
    the same time, for example with and without a window.

    Attributes:
        tasks: the tasks, which compute every query row once.
        before: the tasks of the previous nano-batch, if servers keep the k,v rows of these tasks; else None.
        windows: for each kind of layer, the number of keys that a query sees; 0 for all keys, and for a kind of which
            this plan has no layer.
        kind: [D] int64 index in ``windows`` of each document's kind of layer; None stands for 0 everywhere.
    """

    layout: Layout
    tasks: Tasks
    before: Tasks | None = None
    windows: tuple[int, ...] = (0,)
    kind: np.ndarray | None = None

    @property
    def kind_of_task(self) -> np.ndarray:
        return np.zeros(len(self.tasks), np.int64) if self.kind is None else self.kind[self.tasks.document]

    @cached_property
    def first_key(self) -> np.ndarray:
        """Returns [T] int64 first k,v row that each task reads."""
        if not any(self.windows):
            return np.zeros_like(self.tasks.start)
        return first_key(np.array(self.windows)[self.kind_of_task], self.tasks.start)

    @property
    def region_rows(self) -> np.ndarray:
        """Returns [T] number of k,v rows that each task reads."""
        return self.tasks.stop - self.first_key

    @cached_property
    def contexts(self) -> Contexts:
        # ends [T]: whether a task is the last one of its context. Tasks are sorted by server, document and start. With
        # a window, a context also ends before a task that reads no key of the task before.
        tasks, first = self.tasks, self.first_key
        ends = tasks.last_on_server
        if any(self.windows):
            ends = ends | np.append(first[1:] >= tasks.stop[:-1], True)[: len(tasks)]
        last, of_task = tasks.take(ends), np.cumsum(ends) - ends
        heads = np.append(True, ends[:-1])[: len(tasks)]
        first = first[heads]
        if self.before is None or not len(last):
            return Contexts(last, first, first, np.zeros_like(first), of_task)
        begin, at = self._kept_of(self.before, last)
        return Contexts(last, first, begin, at, of_task)

    def _kept_of(self, before: Tasks, last: Tasks) -> tuple[np.ndarray, np.ndarray]:
        """Returns ``begin`` and ``at`` of :class:`Contexts`, given the tasks ``before`` and each context's last task.

        Pong uses only whole shards of what a server read in ping, because exchanges send a shard from its first row on.
        Example: a document has the shards [0, 4), [4, 8) and [8, 12). If a server read the rows [0, 10), pong uses
        [0, 8).
        """
        assert not any(self.windows), "kinds with a window keep no rows of the previous nano-batch"
        # stop [L]: the server read the rows [0, stop) of the context's document in the previous nano-batch; 0 if it
        # read none. For the search, a server and a document become one number.
        kept = before.take(before.last_on_server)
        documents = len(self.layout.last)
        key = kept.server * documents + kept.document
        wanted = last.server * documents + last.document
        found = np.searchsorted(key, wanted)
        stop = np.where(np.append(key, -1)[found] == wanted, np.append(kept.stop, 0)[found], 0)
        # begin [L]: where the last whole shard in [0, stop) ends. Documents follow each other in a server's buffer, in
        # the order of "kept".
        kv = self.layout.kv
        span = int(kv.stop.max()) + 1
        whole = np.searchsorted(kv.document * span + kv.stop, last.document * span + stop, side="right") - 1
        begin = np.where((whole >= 0) & (kv.document[whole] == last.document), kv.stop[whole], 0)
        rows = np.cumsum(kept.stop) - kept.stop
        first = np.searchsorted(kept.server, last.server)
        return begin, np.where(begin > 0, np.append(rows, 0)[found] - np.append(rows, 0)[first], 0)

    @cached_property
    def q_reads(self) -> Reads:
        """Returns the query rows that tasks read, as ranges of shards."""
        return Reads.of(self.tasks, self.tasks.start, self.layout.q)

    @cached_property
    def kv_reads(self) -> Reads:
        """Returns the k,v rows that contexts need from homes, as ranges of shards.

        In layers without a window, all servers read a shard from its first row on. So a server may get rows from a
        *gateway*: the server on its node that reads most rows of the shard. With a window, servers begin at different
        rows, so rows come *straight* from home."""
        reads = Reads.of(self.contexts.last, self.contexts.begin, self.layout.kv)
        if not any(self.windows):
            return reads
        document = self.contexts.last.document
        kind = np.zeros_like(document) if self.kind is None else self.kind[document]
        return replace(reads, straight=(np.array(self.windows) > 0)[kind[reads.task]])

    def check(self) -> None:
        """Raises PlanError unless every query row is computed exactly once, by an existing server."""
        tasks, layout = self.tasks, self.layout
        unknown = tasks.server[(tasks.server < 0) | (tasks.server >= layout.ranks)]
        if len(unknown):
            raise PlanError(
                f"The plan names server {int(unknown[0])}, but the layout's ranks are 0 to {layout.ranks - 1}: "
                "the plan was made for another number of ranks."
            )
        order = order_by(tasks.document, tasks.start)
        document, start, stop = tasks.document[order], tasks.start[order], tasks.stop[order]
        computed = np.bincount(document, weights=stop - start, minlength=len(layout.last)).astype(np.int64)
        touching = (document[1:] != document[:-1]) | (start[1:] == stop[:-1])
        begins = np.append(True, document[1:] != document[:-1])[: len(document)]
        if (
            not np.array_equal(computed, layout.last - layout.first)
            or not touching.all()
            or not np.array_equal(start[begins], layout.first[document[begins]])
        ):
            raise PlanError("The plan does not compute every query row exactly once.")


def plan_at_home(layout: Layout) -> Plan:
    """Returns the plan in which each home computes its own query rows."""
    q = layout.q
    return Plan(layout, Tasks.sorted(q.document, q.start, q.stop, q.rank))


def fingerprint(plans: Iterable[Plan]) -> int:
    """Returns a CRC-32 checksum of the layouts and tasks of ``plans``."""
    value = 0
    for plan in plans:
        layout, tasks = plan.layout, plan.tasks
        shards = (*layout.q.columns(), *layout.kv.columns())
        of_tasks = (tasks.document, tasks.start, tasks.stop, tasks.server)
        for column in (layout.last, *shards, *of_tasks):
            value = zlib.crc32(np.ascontiguousarray(column).tobytes(), value)
    return value
