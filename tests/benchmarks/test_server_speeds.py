"""Figures of servers of unlike speeds, from made-up measurements."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.server_speeds import Measured, Setup, compared, missed


def _measured(*attention_s: float) -> Measured:
    seconds, step_s = np.array([attention_s] * 2), np.array([9.0, 9.0])
    return Measured(seconds, step_s, seconds, step_s, losses=np.array([5.0, 6.0]))


def test_half_a_server_s_speed_is_levelled() -> None:
    setup = Setup(ranks=2, gpus=True, steps=2, seed=1)
    equal, by_speed = _measured(1.0, 2.0), _measured(1.32, 1.36)
    found = compared(setup, {"equal": equal, "by_speed": by_speed})
    assert found["slowest_over_what_speeds_allow"]["mean"] == pytest.approx(1.36 / (2.0 / 1.5))
    assert found["attention_by_speed_over_equal"] == pytest.approx(0.68)
    assert found["least_that_speeds_allow_over_equal"] == pytest.approx(2 / 3)
    assert missed(found, gpus=True) == []
    wrong = replace(by_speed, attention_s=by_speed.attention_s * [1, 1.2], losses=by_speed.losses * 1.1)
    said = " ".join(missed(compared(setup, {"equal": equal, "by_speed": wrong}), gpus=True))
    for words in ("what speeds allow", "equal planning's time, limit", "were predicted", "by_speed", "Losses are"):
        assert words in said
