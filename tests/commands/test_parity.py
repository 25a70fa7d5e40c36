"""Tests distca/commands/parity.py: what it makes of the figures of its suites, which are tested by themselves."""

from __future__ import annotations

import sys
from math import inf, nan
from typing import Any

import pytest

from distca.commands import parity as module
from distca.testing import ranks


def _row(worst: float) -> dict[str, Any]:
    return {"suite": "float32", "ranks": 1, "tp": 1, "pp": 1, "worst": worst, "limit": 1e-5}


@pytest.mark.parametrize("worst", [[1e-6, 1e-6], [1e-6, 1e-4], [1e-6, nan], [nan, 1e-6], [inf, 1e-6]])
def test_all_cases_must_be_within_their_limit(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], worst: list[float]
) -> None:
    monkeypatch.setattr(ranks, "run_ranks", lambda *_, **__: [[_row(each) for each in worst]])
    ended: list[Any] = []
    monkeypatch.setattr(sys, "exit", ended.append)
    module.parity(max_ranks=1)
    agrees = worst == [1e-6, 1e-6]
    assert ended == ([] if agrees else [1])
    said = capfd.readouterr()
    assert ("agrees" in said.out + said.err) == agrees != ("differs" in said.out + said.err)


@pytest.mark.parametrize("figures", [(1e-6, nan), (nan, 1e-6), (1e-6, inf)])
def test_a_figure_that_is_no_number_is_the_worst(figures: tuple[float, float]) -> None:
    assert module._worst(dict(enumerate(figures))) == inf  # type: ignore[arg-type]
