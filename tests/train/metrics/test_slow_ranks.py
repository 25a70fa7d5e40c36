"""A GPU that is slower than the others is named; one that has more to do, or waits, is not."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from distca.train.metrics.slow_ranks import STEPS, SlowRanks, speeds_as_measured
from distca.train.metrics.step_record import StepRecorder


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


@pytest.mark.parametrize("servers", [(0, 1), (0, 2)], ids=["as at first", "one has died, and another came"])
def test_a_slow_gpu_can_be_planned_as_slower(servers: tuple[int, ...], caplog: pytest.LogCaptureFixture) -> None:
    """Eight GPUs and two servers, two of each a tensor-parallel group; one GPU of the third takes a quarter longer."""
    recorder: Any = object.__new__(StepRecorder)
    world = SimpleNamespace(size=8, rank=0, device=SimpleNamespace(type="cuda"))
    cad = SimpleNamespace(enabled=True, speeds=())
    recorder._trainer = SimpleNamespace(world=world, config=SimpleNamespace(cad=cad))
    recorder._slow, recorder._servers_at_first, recorder._servers = SlowRanks(), (0, 1), servers
    recorder._places, recorder._server_places = ["here"] * 8, ["there"] * 2
    by_rank = np.stack((np.arange(10) // 2, np.ones(10)), axis=1)
    by_rank[5, 1] = 1.25
    with caplog.at_level(logging.WARNING):
        for _ in range(STEPS + 5):
            recorder._watch_speed(by_rank, SimpleNamespace(seconds_after=np.ones((1, 5))))
    assert caplog.text.count("Rank 5 (here) took 25 % longer") == 1
    advised = "again with --cad.speeds '[1,1,0.8,1,1]'." in caplog.text
    assert advised == (servers == (0, 1)) == ("--cad.speeds" in caplog.text)
    by_rank = by_rank.copy()
    by_rank[1, 1] = 2.2
    with caplog.at_level(logging.WARNING):
        for _ in range(STEPS):
            recorder._watch_speed(by_rank, SimpleNamespace(seconds_after=np.ones((1, 5))))
    last = [each.getMessage() for each in caplog.records if "--cad.speeds" in each.getMessage()][-1:]
    assert [each.partition("--cad.speeds ")[2] for each in last] == ["'[0.94,1,0.8,1,1]'."] * advised


def test_a_speed_that_is_advised_is_above_0() -> None:
    assert speeds_as_measured([1.0, 1.0], [0, 1], np.array([300.0, 0.0]), [0]) == [0.01, 1.0]
