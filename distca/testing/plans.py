"""Plans that a scheduler would never make, to test that what runs them does not care."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from distca.plan import Layout, Plan, Tasks


def random_plan(layout: Layout, seed: int, cuts: int = 3, window: int = 0) -> Plan:
    """Cut every document's rows at up to ``cuts`` random places and give each piece to a random server, for layers
    whose queries see ``window`` keys; 0 for all."""
    random = np.random.default_rng(seed)
    pieces: list[tuple[int, int, int, int]] = []
    for document in np.flatnonzero(layout.last > layout.first):
        first, last = int(layout.first[document]), int(layout.last[document])
        places = np.unique(random.integers(first, last, size=random.integers(0, cuts + 1)))
        borders = np.unique(np.concatenate(([first], places, [last])))
        for start, stop in pairwise(borders):
            pieces.append((int(document), int(start), int(stop), int(random.integers(layout.ranks))))
    columns = np.array(pieces, np.int64).reshape(-1, 4).T
    plan = Plan(layout.within(window), Tasks.sorted(*columns), windows=(window,))
    plan.check()
    return plan
