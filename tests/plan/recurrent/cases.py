"""Layouts that no planner makes: documents cut anywhere, on any ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from distca.plan import Layout, Shards


def cut_anywhere(cuts: Sequence[Sequence[int]], ranks: int, seed: int, halves: int = 2) -> tuple[Layout, ...]:
    """Layouts of documents whose pieces end at ``cuts``, each on a random rank; ping has a prefix of every document.
    Only what recurrent layers look at is filled."""
    random = np.random.default_rng(seed)
    shards: list[list[tuple[int, int, int, int]]] = [[] for _ in range(halves)]
    for document, ends in enumerate(cuts):
        head = int(random.integers(0, len(ends) + 1)) if halves == 2 else len(ends)
        for place, (start, stop) in enumerate(pairwise([0, *ends])):
            shards[int(place >= head)].append((document, start, stop, int(random.integers(ranks))))
    layouts = []
    for columns in shards:
        random.shuffle(columns)
        rows, placed = np.zeros(ranks, np.int64), []
        for document, start, stop, rank in columns:
            placed.append((document, start, stop, rank, int(rows[rank])))
            rows[rank] += stop - start
        table = np.array(sorted(placed), np.int64).reshape(-1, 5).T
        empty, q = np.zeros(0, np.int64), Shards(*table)
        layouts.append(Layout(ranks, empty, empty, q, q, rows, np.zeros_like(rows)))
    return tuple(layouts)


def random_cuts(seed: int) -> list[list[int]]:
    """Where the pieces of a few documents end; many are of one row."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(int(random.integers(0, 7))):
        length = int(random.choice((1, 2, 3, 5, 12, 30)))
        cuts = np.unique(np.append(random.integers(1, length + 1, size=random.integers(0, 8)), length))
        found.append(cuts.tolist())
    return found
