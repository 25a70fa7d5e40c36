"""Plans: which attention server computes which CA-task, and what it must have for that."""

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

    A context is a range of k,v rows of one document on one server. Tasks there share a context where their keys
    overlap. Without a window all do, as each sees its document from the start. Example: the tasks [2, 4) and [6, 7) of
    a document read keys [0, 4) and [0, 7), so they share the context [0, 7). With a window of 2 they read [1, 4) and
    [5, 7): two contexts.

    Attributes:
        last: the last task of each context, whose stop is the context's.
        first: [L] first row of each context.
        begin: [L] first row that must travel; the server still has those before it from the nano-batch before.
        at: [L] where the rows [first, begin) begin in the server's buffer of that nano-batch, which has documents one
            after the other.
        of_task: [T] context of every task.
    """

    last: Tasks
    first: np.ndarray
    begin: np.ndarray
    at: np.ndarray
    of_task: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """[L] rows of each context that must travel."""
        return self.last.stop - self.begin


@dataclass(frozen=True, eq=False)
class Plan:
    """A layout and the server of every query row in it; the same for all layers of a kind.

    A plan is equal only to itself, as a layout is. Array legend: D documents, T tasks.

    Attributes:
        layout: the nano-batch's layout.
        tasks: its CA-tasks.
        before: the tasks of the nano-batch before, if servers keep its k,v rows, which do not travel to them again.
            Kinds with a window keep none.
        windows: by kind of layer, the keys that a query sees; 0 for all, and for kinds that the plan has no layers of.
        kind: [D] int64 number of every document's kind of layer, since stages may run different ones; None where all
            documents have the first.
    """

    layout: Layout
    tasks: Tasks
    before: Tasks | None = None
    windows: tuple[int, ...] = (0,)
    kind: np.ndarray | None = None

    @property
    def kind_of_task(self) -> np.ndarray:
        """[T] int64 number of every task's kind of layer."""
        return np.zeros(len(self.tasks), np.int64) if self.kind is None else self.kind[self.tasks.document]

    @cached_property
    def first_key(self) -> np.ndarray:
        """[T] int64 first k,v row that every task reads."""
        if not any(self.windows):
            return np.zeros_like(self.tasks.start)
        return first_key(np.array(self.windows)[self.kind_of_task], self.tasks.start)

    @property
    def region_rows(self) -> np.ndarray:
        """[T] k,v rows that every task reads."""
        return self.tasks.stop - self.first_key

    @cached_property
    def contexts(self) -> Contexts:
        """The contexts that servers need for the documents of their tasks."""
        # Tasks are sorted by server, document and start. A context ends with a document's last task on a server, or
        # where the next task's first key lies behind the keys of this one.
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
        """[L] rows of each context that its server has from the nano-batch ``before``, counted from the start of its
        document. With them [L] where these rows begin in the server's buffer of that nano-batch.

        Example: a server read rows [0, 10) of a document in ping, whose home shards are [0, 4), [4, 8) and [8, 12). For
        pong it has the whole shards of these, rows [0, 8)."""
        assert not any(self.windows), "kinds with a window keep no rows of the nano-batch before"
        # "stop" is how far each context's server read its document before; 0 where it did not. (server, document) is
        # one number for the search.
        kept = before.take(before.last_on_server)
        documents = len(self.layout.last)
        key = kept.server * documents + kept.document
        wanted = last.server * documents + last.document
        found = np.searchsorted(key, wanted)
        stop = np.where(np.append(key, -1)[found] == wanted, np.append(kept.stop, 0)[found], 0)
        # Only whole shards count as kept, since an exchange sends the first rows of a shard, never its last ones alone.
        kv = self.layout.kv
        span = int(kv.stop.max()) + 1
        whole = np.searchsorted(kv.document * span + kv.stop, last.document * span + stop, side="right") - 1
        begin = np.where((whole >= 0) & (kv.document[whole] == last.document), kv.stop[whole], 0)
        rows = np.cumsum(kept.stop) - kept.stop
        first = np.searchsorted(kept.server, last.server)
        return begin, np.where(begin > 0, np.append(rows, 0)[found] - np.append(rows, 0)[first], 0)

    @cached_property
    def q_reads(self) -> Reads:
        """The query rows of the tasks."""
        return Reads.of(self.tasks, self.tasks.start, self.layout.q)

    @cached_property
    def kv_reads(self) -> Reads:
        """The k,v rows of contexts that servers do not have from the nano-batch before.

        Gateways hand on rows only of documents without a window, whose readers all begin at the document's start."""
        reads = Reads.of(self.contexts.last, self.contexts.begin, self.layout.kv)
        if not any(self.windows):
            return reads
        document = self.contexts.last.document
        kind = np.zeros_like(document) if self.kind is None else self.kind[document]
        return replace(reads, straight=(np.array(self.windows) > 0)[kind[reads.task]])

    def check(self) -> None:
        """Raises PlanError unless every query row is computed exactly once, by an existing server."""
        # Tasks by document and start: they must touch, begin at the document's first row, and have all of its rows.
        tasks, layout = self.tasks, self.layout
        if len(tasks) and (tasks.server.min() < 0 or tasks.server.max() >= layout.ranks):
            raise PlanError(
                f"The plan names server {int(tasks.server.max())}, but the layout has {layout.ranks} ranks: "
                "it was made for another world size."
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
    """The plan without disaggregation: every shard is computed by its home rank."""
    q = layout.q
    return Plan(layout, Tasks.sorted(q.document, q.start, q.stop, q.rank))


def fingerprint(plans: Iterable[Plan]) -> int:
    """The CRC-32 of all layouts and tasks: ranks that made the same plans have the same number."""
    value = 0
    for plan in plans:
        layout, tasks = plan.layout, plan.tasks
        shards = (*layout.q.columns(), *layout.kv.columns())
        of_tasks = (tasks.document, tasks.start, tasks.stop, tasks.server)
        for column in (layout.last, *shards, *of_tasks):
            value = zlib.crc32(np.ascontiguousarray(column).tobytes(), value)
    return value
