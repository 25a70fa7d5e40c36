"""Tasks: the units of core attention, each computed by one server.

A *task* is a range [start, stop) of query rows of one document, with all keys and values that these rows read: without
a window the keys and values [0, stop) of the document. A *server* is a rank that computes tasks. Tasks are called
CA-tasks in arXiv 2510.18121, section 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.plan.sorting import order_by


@dataclass(frozen=True)
class Tasks:
    """Tasks, sorted by (server, document, start). Array legend: T tasks; all arrays are int64.

    Attributes:
        document: [T] index of the document among the documents that were planned together.
        start: [T] first query position in the document.
        stop: [T] one past the last query position.
        server: [T] rank that computes the task.
    """

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    server: np.ndarray

    def __len__(self) -> int:
        return len(self.document)

    def take(self, chosen: np.ndarray) -> Tasks:
        return Tasks(self.document[chosen], self.start[chosen], self.stop[chosen], self.server[chosen])

    def columns(self) -> tuple[np.ndarray, ...]:
        return self.document, self.start, self.stop, self.server

    @property
    def last_on_server(self) -> np.ndarray:
        """Returns [T] bool, whether the task is the last one of its document on its server."""
        differs = (self.document[1:] != self.document[:-1]) | (self.server[1:] != self.server[:-1])
        return np.append(differs, True)[: len(self)]

    @staticmethod
    def sorted(document: np.ndarray, start: np.ndarray, stop: np.ndarray, server: np.ndarray) -> Tasks:
        """Makes tasks of ranges in any order. Ranges of one document and server that touch become one task.

        Example: [0, 4) and [4, 6) become [0, 6)."""
        order = order_by(server, document, start)
        document, start, stop, server = (np.asarray(x, np.int64)[order] for x in (document, start, stop, server))
        if len(document) == 0:
            return Tasks(document, start, stop, server)
        # firsts, lasts: the first and the last range of each task.
        joins = (document[1:] == document[:-1]) & (server[1:] == server[:-1]) & (start[1:] == stop[:-1])
        firsts = np.flatnonzero(np.append(True, ~joins))
        lasts = np.append(firsts[1:], len(document)) - 1
        return Tasks(document[firsts], start[firsts], stop[lasts], server[firsts])
