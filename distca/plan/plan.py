"""Plans: which attention server computes which CA-task, and what it must have for that."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distca.errors import PlanError
from distca.plan.hops import Reads
from distca.plan.layout import Layout
from distca.plan.sorting import order_by
from distca.plan.tasks import Tasks


@dataclass(frozen=True)
class Contexts:
    """k,v rows that servers need: of every document on a server those before the end of its last task there.
    Array legend: L last tasks; all arrays are int64.

    Attributes:
        last: those tasks.
        begin: [L] how many of the first rows the server still has from the half before.
        at: [L] where these begin in its buffer of that half, which has documents one after the other.
    """

    last: Tasks
    begin: np.ndarray
    at: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """[L] rows that must come."""
        return self.last.stop - self.begin


@dataclass(frozen=True)
class Plan:
    """A layout and the server of every query row in it; the same for all layers.

    Attributes:
        layout: the nano-batch's layout.
        tasks: its CA-tasks.
        before: tasks of the half before, if their servers keep its k,v rows: these do not travel to them again.
    """

    layout: Layout
    tasks: Tasks
    before: Tasks | None = None

    @cached_property
    def contexts(self) -> Contexts:
        """What servers need of the documents of their tasks."""
        last = self.tasks.take(self.tasks.last_on_server)
        if self.before is None or not len(last):
            return Contexts(last, np.zeros_like(last.stop), np.zeros_like(last.stop))
        kept = self.before.take(self.before.last_on_server)
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
        at = np.where(begin > 0, np.append(rows, 0)[found] - np.append(rows, 0)[first], 0)
        return Contexts(last, begin, at)

    @cached_property
    def q_reads(self) -> Reads:
        """The query rows of the tasks."""
        return Reads.of(self.tasks, self.tasks.start, self.layout.q)

    @cached_property
    def kv_reads(self) -> Reads:
        """The k,v rows that the contexts' last tasks do not have of the half before."""
        return Reads.of(self.contexts.last, self.contexts.begin, self.layout.kv)

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
