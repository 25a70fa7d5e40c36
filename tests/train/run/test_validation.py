"""Validation batches without a target token: no loss is made up for them."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from distca.data.corpus import Corpus
from distca.data.sampler import shuffled
from distca.errors import ConfigError, DataError
from distca.train.config.cli import parse_run_config
from distca.train.config.schema import LogConfig
from distca.train.run import loop
from distca.train.run.main import _check_corpus

CONFIG = SimpleNamespace(train=SimpleNamespace(validate_batches=2, evaluate=True))


def _loop(targets: int) -> Any:
    made = object.__new__(loop._Loop)
    made._corpus, made._config, made._speaks = SimpleNamespace(validation=[[1]]), CONFIG, True
    made.loss_of_validation = lambda: (1.5 if targets else float("nan"), targets)
    return made


def test_training_goes_on_without_a_validation_loss(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "distca"):
        assert _loop(3).validate() == 1.5 and not caplog.messages
        assert _loop(0).validate() is None
    assert "train.validate_batches is 2" in caplog.text


def test_an_evaluation_of_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = _loop(0)
    monkeypatch.setattr(loop, "_Loop", lambda *_: nothing)
    corpus: Any = SimpleNamespace(validation=[[1]])
    trainer: Any = SimpleNamespace(config=CONFIG)
    folder: Any = None
    with pytest.raises(ConfigError, match="no token whose loss counts"):
        loop.evaluate(trainer, corpus, folder, None)


def test_validation_conversations_with_nothing_to_learn_are_refused_before_work() -> None:
    held_back = int(shuffled(2, 0)[0])

    class Talks:
        """The one that is held back has its answer at the start of a piece, which has nothing before it."""

        vocabulary, masked = 256, True
        lengths = np.array([12 if number == held_back else 6 for number in range(2)])

        def learned(self, document: int, start: int, stop: int) -> np.ndarray:
            return np.arange(start, stop) == (6 if document == held_back else 3)

    config = parse_run_config(["--data.validation_fraction", "0.5"])
    corpus = Corpus(cast(Any, Talks()), 6, "split", 0.5, 0)
    assert len(corpus.train) == 1 and not len(corpus.validation)
    with pytest.raises(DataError, match="and no piece of them has a token to learn; raise"):
        _check_corpus(config, corpus, 1)


def test_a_window_of_steps_that_a_run_does_not_do_is_said() -> None:
    does = "and this run does steps 11 to 20."

    def said(**windows: Any) -> list[str]:
        return loop._not_recorded(LogConfig(**windows), 11, 20)

    assert said() == said(timeline_steps=(1, 11), profile_steps=(20, 30)) == []
    assert said(profile_steps=(21, 22)) == [f"No profile: log.profile_steps is [21, 22], {does}"]
    assert said(timeline_steps=(9, 10)) == [f"No timeline: log.timeline_steps is [9, 10], {does}"]
