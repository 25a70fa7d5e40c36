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
    """k,v rows that servers need. Tasks of one document on one server share a context where their keys overlap: without
    a window all of them, as each sees its document from the start. Array legend: L contexts, T tasks; arrays are int64.

    Attributes:
        last: the last task of each, whose stop is the context's.
        first: [L] its first row.
        begin: [L] first row that must come; the server still has those before it from the half before.
        at: [L] where the rows from ``first`` to ``begin`` begin in its buffer of that half, which has documents one
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
        """[L] rows that must come."""
        return self.last.stop - self.begin


@dataclass(frozen=True, eq=False)
class Plan:
    """A layout and the server of every query row in it; the same for all layers of a kind.

    A plan is equal to itself alone. Array legend: D documents, T tasks.

    Attributes:
        layout: the nano-batch's layout.
        tasks: its CA-tasks.
        before: tasks of the half before, if their servers keep its k,v rows: these do not travel to them again. Kinds
            with a window keep none.
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
        """[L] rows that the servers of ``last`` tasks have of the half ``before``, from the start of their documents.
        With them [L] the first of these rows in the servers' buffers of that half."""
        assert not any(self.windows), "kinds with a window keep no rows of the half before"
        kept = before.take(before.last_on_server)
        documents = len(self.layout.last)
        key = kept.server * documents + kept.document
        wanted = last.server * documents + last.document
        found = np.searchsorted(key, wanted)
        stop = np.where(np.append(key, -1)[found] == wanted, np.append(kept.stop, 0)[found], 0)
        # Whole shards of home rows: who reads rows of a shard reads its first ones.
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
        """The k,v rows of the contexts that servers do not have of the half before. Gateways hand on rows of documents
        without a window, whose readers all begin at the document's start."""
        reads = Reads.of(self.contexts.last, self.contexts.begin, self.layout.kv)
        if not any(self.windows):
            return reads
        document = self.contexts.last.document
        kind = np.zeros_like(document) if self.kind is None else self.kind[document]
        return replace(reads, straight=(np.array(self.windows) > 0)[kind[reads.task]])

    def check(self) -> None:
        """Raise PlanError unless every query row is computed exactly once, by an existing server."""
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
    """A number that two ranks have alike if they made the same plans: the CRC-32 of all layouts and tasks."""
    value = 0
    for plan in plans:
        layout, tasks = plan.layout, plan.tasks
        shards = (*layout.q.columns(), *layout.kv.columns())
        of_tasks = (tasks.document, tasks.start, tasks.stop, tasks.server)
        for column in (layout.last, *shards, *of_tasks):
            value = zlib.crc32(np.ascontiguousarray(column).tobytes(), value)
    return value
