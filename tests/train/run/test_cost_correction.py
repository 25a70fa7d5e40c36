"""What is learned from measured attention times, and plans that follow it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distca.data.corpus import Corpus
from distca.plan.cost_correction import WHOLE_STEP, Learned, Learnings, ServerWork
from distca.plan.metrics import imbalance
from distca.testing.ranks import run_ranks
from distca.train.config.cli import parse_run_config
from distca.train.data.corpus import open_corpus, open_sampler
from distca.train.data.prefetch import StepInputs, make_step_inputs
from distca.train.run.cost_correction import Learner, by_server, learns
from tests.train.metrics.test_phase_table import PLANNING
from tests.train.small_runs import arguments, steps_of, train_all, write_texts

TRUE = np.array([1.0, 0.8, 1.1, 1.0, 0.95])


def _work(seconds: np.ndarray, reach: float | np.ndarray = 0.0) -> ServerWork:
    return ServerWork(seconds, seconds * reach)


def _learned(steps: int, noise: float, work: np.ndarray | None = None) -> Learner:
    learner, random = Learner(5, True), np.random.default_rng(1)
    for _ in range(steps):
        given = random.uniform(0.9, 1.1, (1, 5)) if work is None else work[None]
        learner.learn([WHOLE_STEP], _work(given), given / TRUE * random.normal(1, noise, (1, 5)))
    return learner


def _current(*arguments: Any) -> np.ndarray:
    return _learned(*arguments).current[WHOLE_STEP].speeds


def test_true_speeds_are_found() -> None:
    assert _current(100, 0.0) == pytest.approx(TRUE / TRUE.mean(), rel=1e-3)
    assert _current(100, 0.02) == pytest.approx(TRUE / TRUE.mean(), rel=0.03)


def test_mean_stays_1_and_the_first_step_does_not_count() -> None:
    assert not _learned(1, 0.0).current
    for steps in (2, 3, 10):
        assert _current(steps, 0.05).mean() == pytest.approx(1, abs=1e-4)


def test_servers_without_work_keep_their_speed() -> None:
    current = _current(50, 0.0, np.array([1.0, 1.0, 1.0, 0.0, 0.01]))
    assert current[3] == current[4] and current[1] < current[0] < current[2]


def test_a_hanging_server_is_not_written_off() -> None:
    learner = Learner(3, True)
    for _ in range(200):
        learner.learn([WHOLE_STEP], _work(np.ones((1, 3))), np.array([[1.0, 1.0, 1000.0]]))
    current = learner.current[WHOLE_STEP].speeds
    assert current.min() > 0.24 * current.max()


def test_every_kind_of_phase_has_its_own_speeds() -> None:
    filling, full = ("forward", (True, False)), ("forward", (True, True))
    true = {filling: np.array([0.9, 1.1]), full: np.array([1.04, 0.96])}
    learner, random = Learner(2, True), np.random.default_rng(2)
    kinds = [filling, full, full, full]
    for _ in range(100):
        work = random.uniform(0.1, 3.0, (4, 2))
        learner.learn(kinds, _work(work), work / [true[kind] for kind in kinds])
    assert set(learner.current) == {filling, full}
    for kind, expected in true.items():
        # Those of a kind are added up, so that little work counts little; speeds are rounded to 4 digits.
        assert learner.current[kind].speeds == pytest.approx(expected, rel=1e-3)


def test_how_fast_speeds_are_learned() -> None:
    """Equal speeds count as a quarter of a step, and every step nine tenths of the next one; sums by hand."""
    learner = Learner(2, True)
    for measured in ([0.8, 1.25], [0.8, 1.25]):
        learner.learn([WHOLE_STEP], _work(np.ones((1, 2))), np.array([measured]))
    # log 1.25 in 1 of 0.9 x 0.25 + 1 steps: exp(+-0.18216), against their mean and rounded to 4 digits.
    assert learner.current[WHOLE_STEP].speeds.tolist() == [1.1802, 0.8198]
    learner.learn([WHOLE_STEP], _work(np.ones((1, 2))), np.ones((1, 2)))
    # 0.9 x log 1.25 in 0.9 x 1.225 + 1 steps: exp(+-0.09553).
    assert learner.current[WHOLE_STEP].speeds.tolist() == [1.0952, 0.9048]


def test_kinds_that_a_step_does_not_have_are_remembered() -> None:
    kinds = [("forward", (True, False)), ("forward", (True, True))]
    learner, found = Learner(2, True), []
    for kind in kinds:
        for _ in range(2):
            learner.learn([kind], _work(np.ones((1, 2))), np.array([[0.8, 1.25]]))
        found.append(learner.current)
    assert set(found[0]) == set(kinds[:1]) and set(found[1]) == set(kinds)
    assert all(each.speeds.tolist() == [1.1802, 0.8198] for each in found[1].values())


@pytest.mark.parametrize("servers", [2, 5])
def test_what_reach_costs_is_told_from_slow_servers(servers: int) -> None:
    random = np.random.default_rng(servers)
    true = random.uniform(0.9, 1.1, servers)
    learner = Learner(servers, True)
    for _ in range(60):
        seconds, reach = random.uniform(0.5, 1.5, (1, servers)), random.uniform(0.2, 0.8, (1, servers))
        reach[0, 0] = min(reach[0, 0] + 0.3, 0.95)  # the first server has mostly ends of documents
        measured = seconds * np.exp(0.05 * reach) / true * random.normal(1, 0.002, (1, servers))
        learner.learn([WHOLE_STEP], _work(seconds, reach), 3 * measured)
    learned = learner.current[WHOLE_STEP]
    assert learned.reach_cost == pytest.approx(0.05, rel=0.2)
    assert learned.speeds == pytest.approx(true / true.mean(), rel=0.01)


def _steps(
    learner: Learner, number: int, true: np.ndarray, reach_cost: float, working: np.ndarray, seed: int = 7
) -> None:
    random = np.random.default_rng(seed)
    for _ in range(number):
        reach = random.uniform(0.1, 0.6, (1, len(true)))
        learner.learn([WHOLE_STEP], _work(working[None], reach), working * (1 + reach_cost * reach) / true)


def test_steps_without_some_servers_leave_what_was_learned() -> None:
    true = np.array([0.85, 0.9, 1.1, 1.15])
    learner = Learner(4, True)
    _steps(learner, 60, true, 0.04, np.ones(4))
    before = learner.current[WHOLE_STEP]
    assert before.reach_cost == pytest.approx(0.04, abs=0.006) and before.speeds == pytest.approx(true, rel=5e-3)
    assert before.typical_reach == pytest.approx(0.35, abs=0.05)
    with np.errstate(all="raise"):
        for working in ([0, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 0.01], [0, 0, 1, 1]):
            _steps(learner, 15, true, 0.04, np.array(working, np.float64))
    after = learner.current[WHOLE_STEP]
    assert after.reach_cost == pytest.approx(0.04, abs=0.01) and after.speeds == pytest.approx(true, rel=5e-3)


def test_servers_that_work_together_now_and_then_are_compared_with_all() -> None:
    true = np.array([0.85, 0.85, 1.15, 1.15])
    learner = Learner(4, True)
    for _ in range(50):
        _steps(learner, 1, true, 0.0, np.ones(4))
        _steps(learner, 1, true, 0.0, np.array([0.0, 0.0, 1.0, 1.0]))
    assert learner.current[WHOLE_STEP].speeds == pytest.approx(true, rel=2e-3)


def test_reach_of_servers_that_work_now_and_then_is_compared_with_all() -> None:
    random, true = np.random.default_rng(3), np.array([0.9, 0.9, 1.1, 1.1])
    learner = Learner(4, True)
    for step in range(160):
        # The last two have late ranges, and in every other step the first two have nothing.
        reach = np.concatenate((random.uniform(0, 0.3, 2), random.uniform(0.5, 0.9, 2)))[None]
        working = np.array([[step % 2, step % 2, 1.0, 1.0]])
        learner.learn([WHOLE_STEP], _work(working, reach), working * np.exp(0.08 * reach) / true)
    learned = learner.current[WHOLE_STEP]
    assert learned.reach_cost == pytest.approx(0.08, abs=0.015)
    predicted = np.exp(learned.reach_cost * np.array([0.15, 0.15, 0.7, 0.7])) / learned.speeds
    really = np.exp(0.08 * np.array([0.15, 0.15, 0.7, 0.7])) / true
    assert predicted / predicted[0] == pytest.approx(really / really[0], rel=2e-3)


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("servers", [2, 4, 8])
def test_a_change_that_lasts_is_followed(servers: int, factor: float) -> None:
    learner, true = Learner(servers, True), np.ones(servers)
    _steps(learner, 60, true, 0.03, np.ones(servers))
    true[0] = factor
    _steps(learner, 12, true, 0.03, np.ones(servers))
    speeds = learner.current[WHOLE_STEP].speeds
    assert abs(np.log(speeds[0] / speeds[1] / factor)) < 0.5 * np.log(2)
    _steps(learner, 40, true, 0.03, np.ones(servers))
    assert learner.current[WHOLE_STEP].speeds == pytest.approx(true / true.mean(), rel=0.02)
    true[0] = 1.0
    _steps(learner, 50, true, 0.03, np.ones(servers))
    assert learner.current[WHOLE_STEP].speeds == pytest.approx(true, rel=0.02)


def test_noise_to_one_side_does_not_favour_servers_that_work_now_and_then() -> None:
    random, learner = np.random.default_rng(5), Learner(8, True)
    for step in range(400):
        working = np.ones((1, 8))
        working[0, :2] = step % 10 == 0
        learner.learn([WHOLE_STEP], _work(working), working * (1 + random.exponential(0.01, (1, 8))))
    assert learner.current[WHOLE_STEP].speeds == pytest.approx(np.ones(8), abs=0.012)


def test_what_reach_explains_is_no_surprise() -> None:
    random, learner = np.random.default_rng(4), Learner(8, True)
    for _ in range(80):
        reach = random.permutation([0.02] * 4 + [0.98] * 4)[None]
        learner.learn([WHOLE_STEP], _work(np.ones((1, 8)), reach), np.exp(0.24 * reach))
    assert learner.current[WHOLE_STEP].reach_cost == pytest.approx(0.24, rel=0.02)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("servers", [2, 8])
def test_one_step_in_which_a_server_hangs_says_little(servers: int, seed: int) -> None:
    learner, true = Learner(servers, True), np.ones(servers)
    _steps(learner, 60, true, 0.03, np.ones(servers), 100 + seed)
    before = learner.current[WHOLE_STEP]
    hanging = true.copy()
    hanging[0] = 0.1
    _steps(learner, 1, hanging, 0.03, np.ones(servers), seed)
    after = learner.current[WHOLE_STEP]
    assert after.speeds == pytest.approx(before.speeds, abs=0.015)
    assert after.reach_cost == pytest.approx(before.reach_cost, abs=0.005)
    _steps(learner, 30, true, 0.03, np.ones(servers))
    assert learner.current[WHOLE_STEP].speeds == pytest.approx(true, abs=0.005)


def test_servers_that_always_reach_alike_say_little_about_its_cost() -> None:
    learner = Learner(2, True)
    for _ in range(100):
        learner.learn([WHOLE_STEP], _work(np.ones((1, 2)), np.array([[0.2, 0.6]])), np.array([[1.0, 1.04]]))
    learned = learner.current[WHOLE_STEP]
    # Either explains it: what both together predict is what was seen.
    assert 0 <= learned.reach_cost < 0.1
    predicted = (1 + learned.reach_cost * np.array([0.2, 0.6])) / learned.speeds
    assert predicted[1] / predicted[0] == pytest.approx(1.04, rel=2e-3)


@pytest.mark.parametrize("true,bound", [(0.6, 0.25), (-0.3, -0.05)])
def test_the_cost_of_reach_is_bounded(true: float, bound: float) -> None:
    learner, random = Learner(2, True), np.random.default_rng(3)
    for _ in range(50):
        reach = random.uniform(0, 1, (1, 2))
        learner.learn([WHOLE_STEP], _work(np.ones((1, 2)), reach), np.exp(true * reach))
    assert learner.current[WHOLE_STEP].reach_cost == bound


@pytest.mark.parametrize("stages", [1, 2])
def test_learned_is_what_servers_did_whatever_speeds_the_plan_counts_with(stages: int) -> None:
    def draw() -> np.ndarray:
        speeds = random.uniform(0.8, 1.2, 4)
        return speeds / speeds.mean()

    random = np.random.default_rng(stages)
    plain, _ = _two_plans(stages, {})
    kinds = plain.pipeline.kinds if plain.pipeline is not None else (WHOLE_STEP,) * len(plain.work.seconds)
    _, inputs = _two_plans(stages, {kind: Learned(draw(), 0.1) for kind in dict.fromkeys(kinds)})
    true = {kind: draw() for kind in dict.fromkeys(kinds)}
    by_phase = inputs.work.seconds / [true[kind] for kind in kinds]
    learner = Learner(4, True)
    for _ in range(60):
        learner.learn_from(inputs, by_phase.sum(axis=0), by_phase if stages > 1 else None)
    assert set(learner.current) == set(true)
    for kind, expected in true.items():
        assert learner.current[kind].speeds == pytest.approx(expected, rel=1e-3)


def _gathered() -> np.ndarray:
    alone = replace(PLANNING, stage=0, stages=1)
    return by_server(alone, [[1.0, 5.0], [2.0, 3.0]][dist.get_rank()])


def test_the_slower_of_a_servers_tensor_parallel_ranks_counts() -> None:
    for figures in run_ranks(2, _gathered):
        assert figures.tolist() == [[2.0, 5.0]]


def test_what_learns() -> None:
    def would(device: str, *settings: str) -> bool:
        return learns(parse_run_config(list(settings)), torch.device(device))

    assert would("cuda")
    assert not would("cpu") and not would("cuda", "--cad.deterministic", "true")
    assert not would("cuda", "--cad.enabled", "false")
    nothing = Learner(2, False)
    for _ in range(5):
        nothing.learn([WHOLE_STEP], _work(np.ones((1, 2))), np.array([[1.0, 2.0]]))
    assert not nothing.current


def _two_plans(stages: int, learned: Learnings) -> tuple[StepInputs, StepInputs]:
    """Of one batch: with nothing learned and with this."""
    settings = {"source": "mix", "path": "pretrain", "vocabulary": 64, "context_length": 4096, "tokens_per_rank": 4096}
    line = [word for name, value in settings.items() for word in (f"--data.{name}", str(value))]
    config = parse_run_config([*line, "--data.validation_fraction", "0", "--train.micro_batches", "2"])
    corpus: Corpus = open_corpus(config)
    planning = replace(PLANNING, rank=0, ranks=4 // stages, stage=0, stages=stages, disaggregate=True)
    planning = replace(planning, nano_batches=2, resend=stages > 1, tolerance=0.02, chunks=1)
    plain, following = (
        make_step_inputs(planning, corpus.train, open_sampler(config, corpus.train, planning.ranks), given)
        for given in ({}, learned)
    )
    return plain, following


def test_plans_give_slow_servers_less() -> None:
    speeds = np.array([1.15, 1.1, 1.05, 0.7])
    plain, learned = _two_plans(1, {WHOLE_STEP: Learned(speeds)})
    assert learned.work.seconds.sum() == pytest.approx(plain.work.seconds.sum(), rel=0.1)  # cuts cost something
    for planned in (plain.seconds_after, learned.seconds_after):
        assert imbalance(planned.sum(axis=0)) < 1.05
    assert imbalance(plain.work.seconds.sum(axis=0) / speeds) > 1.2  # what the same plan would take


def test_phases_are_planned_with_the_speeds_of_their_kind() -> None:
    # Only the first stage is busy in the first forward phase and in the last backward one.
    first, last = ("forward", (True, False)), ("backward", (True, False))
    speeds = {first: np.array([0.8, 0.8, 1.2, 1.2]), last: np.array([1.3, 1.1, 0.9, 0.7])}
    plain, learned = _two_plans(2, {kind: Learned(each) for kind, each in speeds.items()})
    assert learned.pipeline is not None
    kinds = learned.pipeline.kinds
    assert kinds[0] == first and kinds[-1] == last and len(kinds) == 2 * 3
    for phase, kind in enumerate(kinds):
        expected = speeds.get(kind, np.ones(4))
        assert learned.learned[phase].speeds.tolist() == expected.tolist()
        # What each server is given follows its speed in this kind of phase, and where none was learned nothing changes.
        share = learned.work.seconds[phase] / learned.work.seconds[phase].mean()
        assert share == pytest.approx(expected, rel=0.06)
        if kind not in speeds:
            assert np.array_equal(learned.work.seconds[phase], plain.work.seconds[phase])


@pytest.mark.parametrize("stages", [1, 2])
def test_plans_count_with_what_reach_costs(stages: int) -> None:
    kinds = [WHOLE_STEP]
    if stages > 1:
        busy = ((True, False), (True, True), (False, True))
        kinds = [(direction, each) for direction in ("forward", "backward") for each in busy]
    speeds = np.array([1.1, 0.9, 1.05, 0.95])
    plain, learned = _two_plans(stages, dict.fromkeys(kinds, Learned(speeds, 0.2, 0.3)))
    assert len(learned.learned) == len(learned.work.seconds) and {each.reach_cost for each in learned.learned} == {0.2}
    expected, otherwise = (
        ((1 - 0.2 * 0.3) * made.work.seconds + 0.2 * made.work.reaching) / speeds for made in (learned, plain)
    )
    assert learned.seconds_after == pytest.approx(expected)
    assert not np.allclose(expected, learned.work.seconds / speeds, rtol=0.03)
    for planned, without in zip(expected, otherwise, strict=True):
        assert imbalance(planned) < min(1.03, imbalance(without) - 0.01)


def _train(lines: list[list[str]]) -> list[bool]:
    """The first run learns nothing, the others do, which CPU ranks would not. Returns whether anything was learned for
    the plan of each step of each run."""
    from distca.train.metrics.writer import step_record

    differed, record = [], step_record.StepRecorder.record

    def noting(self: Any, inputs: StepInputs, *rest: Any) -> Any:
        differed.append(any((each.speeds != 1).any() for each in inputs.learned))
        return record(self, inputs, *rest)

    step_record.StepRecorder.record = noting  # type: ignore[method-assign]
    train_all(lines[:1])
    step_record.learns = lambda *_: True
    train_all(lines[1:])
    return differed


def test_training_with_learned_speeds_gives_the_same_losses(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    stages = {"parallel__pp": 2, "train__micro_batches": 2, "data__whole_documents": True}
    lines = [
        arguments(name=name, output=tmp_path, data__path=tmp_path / "texts", train__steps=5, **more)
        for name, more in (("equal", {}), ("learned", {}), ("stages", stages))
    ]
    # Learned from the second step on; the third was planned while that one ran.
    learning = [False, False, False, True, True]
    assert run_ranks(2, _train, lines, timeout=200) == [[False] * 5 + 2 * learning] * 2
    losses = [steps_of(tmp_path / name) for name in ("equal", "learned")]
    # Other cuts of the same documents: float32 sums in another order, over a few steps of Adam.
    assert losses[1] == pytest.approx(losses[0], rel=3e-6)
    for name in ("learned", "stages"):
        slowest, fastest = (steps_of(tmp_path / name, f"server_speed_{key}") for key in ("min", "max"))
        assert list(slowest) == [2, 3, 4, 5]
        assert all(slowest[step] <= 1 <= fastest[step] for step in slowest)
    assert "server_speed_min" not in (tmp_path / "equal" / "metrics.jsonl").read_text()
