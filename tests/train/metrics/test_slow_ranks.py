"""A GPU that is slower than the others is named; one that has more to do, or waits, is not."""

from __future__ import annotations

import numpy as np
import pytest

from distca.train.metrics.slow_ranks import STEPS, SlowRanks


def _named(ranks: int, steps: int, slowed: dict[int, float]) -> tuple[list[list[int]], SlowRanks]:
    """What is named by step, if planned work differs twofold and costs are right to 3 % of each step."""
    random, watch, named = np.random.default_rng(5), SlowRanks(), []
    speed = np.ones(ranks)
    for rank, factor in slowed.items():
        speed[rank] = factor
    for _ in range(steps):
        planned = random.uniform(1, 2, ranks)
        named.append(watch.add(3 * planned * speed * random.normal(1, 0.03, ranks), planned))
    return named, watch


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_a_rank_that_is_slower_by_a_tenth_is_named_once(ranks: int) -> None:
    named, watch = _named(ranks, 100, {ranks - 1: 1.1})
    assert [each for each in named if each] == [[ranks - 1]]
    assert STEPS <= next(step for step, each in enumerate(named) if each) < STEPS + 5
    assert watch.slower is not None and watch.slower[ranks - 1] == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_healthy_ranks_are_not_named(ranks: int) -> None:
    named, _ = _named(ranks, 100, {})
    assert not any(named)


def test_a_rank_without_work_says_nothing() -> None:
    watch = SlowRanks()
    for _ in range(STEPS + 5):
        assert watch.add(np.array([1.0, 1.0, 0.0]), np.array([1.0, 1.0, 0.0])) == []
    assert watch.slower is not None and np.isnan(watch.slower[2]) and watch.slower[0] == 0
