"""Speeds of attention servers, learned from measured times, and plans that follow them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from distca.plan.balance import imbalance
from distca.testing.ranks import run_ranks
from distca.train.config import parse_run_config
from distca.train.server_speeds import ServerSpeeds, learns_speeds
from tests.train.small_runs import arguments, steps_of, train_all, write_texts

TRUE = np.array([1.0, 0.8, 1.1, 1.0, 0.95])


def _learned(steps: int, noise: float, work: np.ndarray | None = None) -> ServerSpeeds:
    speeds, random = ServerSpeeds(5, True), np.random.default_rng(1)
    for _ in range(steps):
        given = random.uniform(0.9, 1.1, 5) if work is None else work
        speeds.learn(given, given / TRUE * random.normal(1, noise, 5))
    return speeds


def test_true_speeds_are_found() -> None:
    assert _learned(100, 0.0).current == pytest.approx(TRUE / TRUE.mean(), rel=1e-3)
    assert _learned(100, 0.02).current == pytest.approx(TRUE / TRUE.mean(), rel=0.03)


def test_mean_stays_1_and_the_first_step_does_not_count() -> None:
    assert _learned(1, 0.0).current is None
    for steps in (2, 3, 10):
        current = _learned(steps, 0.05).current
        assert current is not None and current.mean() == pytest.approx(1, abs=1e-4)


def test_servers_without_work_keep_their_speed() -> None:
    current = _learned(50, 0.0, np.array([1.0, 1.0, 1.0, 0.0, 0.01])).current
    assert current is not None
    assert current[3] == current[4] and current[1] < current[0] < current[2]


def test_a_hanging_server_is_not_written_off() -> None:
    speeds = ServerSpeeds(3, True)
    for _ in range(200):
        speeds.learn(np.ones(3), np.array([1.0, 1.0, 1000.0]))
    assert speeds.current is not None and speeds.current.min() > 0.24 * speeds.current.max()


def test_what_learns() -> None:
    def learns(device: str, *settings: str) -> bool:
        return learns_speeds(parse_run_config(list(settings)), torch.device(device))

    assert learns("cuda")
    assert not learns("cpu") and not learns("cuda", "--cad.deterministic", "true")
    assert not learns("cuda", "--cad.enabled", "false")
    nothing = ServerSpeeds(2, False)
    for _ in range(5):
        nothing.learn(np.ones(2), np.array([1.0, 2.0]))
    assert nothing.current is None


@pytest.mark.parametrize("stages", [1, 2])
def test_plans_give_slow_servers_less(stages: int) -> None:
    from distca.data.corpus import Corpus
    from distca.train.corpus import open_corpus, open_sampler
    from distca.train.step_inputs import make_step_inputs
    from tests.train.test_phase_table import PLANNING

    settings = {"source": "mix", "path": "pretrain", "vocabulary": 64, "context_length": 4096, "tokens_per_rank": 4096}
    line = [word for name, value in settings.items() for word in (f"--data.{name}", str(value))]
    config = parse_run_config([*line, "--data.validation_fraction", "0", "--train.micro_batches", "2"])
    corpus: Corpus = open_corpus(config)
    planning = replace(PLANNING, rank=0, ranks=4 // stages, stage=0, stages=stages, disaggregate=True)
    planning = replace(planning, nano_batches=2, resend=stages > 1, tolerance=0.02, chunks=1)
    speeds = np.array([1.15, 1.1, 1.05, 0.7])
    plain, learned = (
        make_step_inputs(planning, corpus.train, open_sampler(config, corpus.train, planning.ranks), given)
        for given in (None, speeds)
    )
    assert learned.work.sum() == pytest.approx(plain.work.sum(), rel=0.1)  # cuts cost something
    for planned in (plain.seconds_after, learned.seconds_after):
        assert imbalance(planned.sum(axis=0)) < 1.05
    assert imbalance(plain.work / speeds) > 1.2  # what the same plan would take


def _train(lines: list[list[str]]) -> None:
    """The first run with equal speeds, the others with learned ones, which CPU ranks would not have."""
    from distca.train import step_record

    train_all(lines[:1])
    step_record.learns_speeds = lambda *_: True
    train_all(lines[1:])


def test_training_with_learned_speeds_gives_the_same_losses(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    stages = {"parallel__pp": 2, "train__micro_batches": 2, "data__whole_documents": True}
    lines = [
        arguments(name=name, output=tmp_path, data__path=tmp_path / "texts", train__steps=5, **more)
        for name, more in (("equal", {}), ("learned", {}), ("stages", stages))
    ]
    run_ranks(2, _train, lines, timeout=200)
    losses = [steps_of(tmp_path / name) for name in ("equal", "learned")]
    # Other cuts of the same documents: float32 sums in another order, over a few steps of Adam.
    assert losses[1] == pytest.approx(losses[0], rel=3e-6)
    for name in ("learned", "stages"):
        slowest, fastest = (steps_of(tmp_path / name, f"server_speed_{key}") for key in ("min", "max"))
        assert list(slowest) == [2, 3, 4, 5]
        assert all(slowest[step] <= 1 <= fastest[step] for step in slowest)
    assert "server_speed_min" not in (tmp_path / "equal" / "metrics.jsonl").read_text()
