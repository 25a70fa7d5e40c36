"""Attention by phase and rank: where calls land, sums over steps, and how level they are."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from matplotlib.image import imread

from distca.plan import PlanOptions, area_cost
from distca.train.metrics.phase_table import PhaseTable, levels, measured_phases
from distca.train.metrics.plots import plot_phases
from distca.train.metrics.step_record import slowest_first

PACKED = PlanOptions(1, area_cost(), stages=3, disaggregate=False)
DISAGGREGATED = PlanOptions(1, area_cost(), stages=3, resend=True)


def test_calls_at_home_lie_in_the_phases_of_their_micro_batches() -> None:
    # Two layers, two micro-batches; stage 1 of 3 runs forward m in phase m + 1 and backward m in phase m + 1.
    serves = {"forward": [1, 1, 2, 2], "backward": [3, 3, 4, 4]}
    column = measured_phases(serves, 1, PACKED, 2)
    assert column is not None and column.tolist() == [0, 2, 4, 0, 0, 6, 8, 0]
    first = measured_phases(serves, 0, PACKED, 2)
    assert first is not None and first.tolist() == [2, 4, 0, 0, 0, 0, 6, 8]
    last = measured_phases(serves, 2, PACKED, 2)
    assert last is not None and last.tolist() == [0, 0, 2, 4, 6, 8, 0, 0]


def test_attention_that_backward_computes_again_is_of_the_backward_phase() -> None:
    """1F1B on stage 0 of 2: forward 0 and 1, backward 0, forward 2, backward 1, backward 2."""
    again = PlanOptions(1, area_cost(), stages=2, disaggregate=False)
    first, second, third = [1, 1], [2, 2], [3, 3]
    serves = {"forward": first + second + first + third + second + third, "backward": [5] * 6}
    column = measured_phases(serves, 0, again, 3)
    assert column is not None and column.tolist() == [2, 4, 6, 0, 0, 12, 14, 16]
    column = measured_phases(serves | {"forward": 2 * first + 2 * second + 2 * third}, 1, again, 3)
    assert column is not None and column.tolist() == [0, 2, 4, 6, 12, 14, 16, 0]


def test_a_disaggregated_rank_serves_in_every_phase() -> None:
    serves = {"forward": [1] * 8, "backward": [2] * 8}
    column = measured_phases(serves, 1, DISAGGREGATED, 2)
    assert column is not None and column.tolist() == [2] * 4 + [4] * 4
    assert measured_phases({"forward": [1] * 7, "backward": [2] * 8}, 1, DISAGGREGATED, 2) is None
    assert measured_phases({"forward": [1] * 8, "backward": []}, 1, DISAGGREGATED, 2) is None


def test_levels_by_phase_and_by_rank() -> None:
    table = np.array([[2.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    assert levels(table) == {"by_phase": [2.0, 2.0, 1.0], "phases": pytest.approx(5 / 3), "ranks": 1.0}
    # A long phase counts more than a short one, and one without attention not at all.
    table = np.array([[6.0, 2.0], [1.0, 1.0], [0.0, 0.0]])
    assert levels(table) == {"by_phase": [1.5, 1.0, 1.0], "phases": pytest.approx(7 / 5), "ranks": 1.4}
    assert levels(np.zeros((2, 2))) == {"by_phase": [1.0, 1.0], "phases": 1.0, "ranks": 1.0}


def test_the_first_step_is_forgotten_and_the_rest_averaged(tmp_path: Path) -> None:
    table = PhaseTable()
    given = []
    for value in (100.0, 1.0, 3.0):
        given.append(np.full((4, 2), value))
        table.add(given[-1], np.array([[9.0 * value, value]] * 4), np.full((4, 2), 5.0 * value))
    assert [step[0, 0] for step in given] == [100, 1, 3], "a step's own figures go elsewhere too"
    table.write(tmp_path / "phases.json", stages=2)
    written = json.loads((tmp_path / "phases.json").read_text())
    assert written["steps"] == 2 and written["measured"]["seconds"] == [[2.0, 2.0]] * 4
    assert written["planned"] == {"seconds": [[10.0, 10.0]] * 4, "by_phase": [1.0] * 4, "phases": 1.0, "ranks": 1.0}
    assert written["at_home"] == {"seconds": [[18.0, 2.0]] * 4, "by_phase": [1.8] * 4, "phases": 1.8, "ranks": 1.8}
    assert written["stages"] == 2 and written["ranks_per_stage"] == 1
    plot_phases(tmp_path / "phases.png", table, stages=2)
    height, width = imread(tmp_path / "phases.png").shape[:2]
    assert height > 300 and width >= 900, "titles need six inches, however few the phases"


def test_servers_without_a_model_are_of_no_stage(tmp_path: Path) -> None:
    table = PhaseTable()
    table.add(np.ones((6, 6)), None, None)
    table.write(tmp_path / "phases.json", stages=2, servers=2)
    written = json.loads((tmp_path / "phases.json").read_text())
    assert written["ranks_per_stage"] == 2 and written["servers_without_a_model"] == 2
    assert written["columns"].endswith("stage by stage, then servers without a model")
    with patch("matplotlib.axes.Axes.axhline") as line:
        plot_phases(tmp_path / "phases.png", table, stages=2, servers=2)
    assert [call.args[0] for call in line.call_args_list] == [1.5, 3.5]


def test_non_attention_seconds_count_where_plans_count_them(tmp_path: Path) -> None:
    table = PhaseTable()
    for value in (100.0, 1.0, 3.0):
        other = np.array([[0.0, value]] * 4)
        table.add(np.array([[3 * value, value]] * 4), other, np.array([[2 * value, value]] * 4), other)
    table.write(tmp_path / "phases.json", stages=2)
    written = json.loads((tmp_path / "phases.json").read_text())
    assert written["other"] == {"seconds": [[0.0, 2.0]] * 4}
    assert written["measured"]["phases"] == 1.5 and written["measured"]["with_linear"]["phases"] == 6 / 5
    assert written["planned"]["phases"] == pytest.approx(4 / 3)
    assert written["planned"]["with_linear"] == {"by_phase": [1.0] * 4, "phases": 1.0, "ranks": 1.0}
    plot_phases(tmp_path / "phases.png", table, stages=2)


def test_kinds_of_layers_are_parts_of_what_is_planned(tmp_path: Path) -> None:
    table = PhaseTable(["full", "window 1,024"])
    for value in (100.0, 1.0, 3.0):
        by_kind = value * np.stack((np.full((4, 2), 3.0), np.full((4, 2), 1.0)))
        planned = by_kind.sum(axis=0)
        table.add(planned, planned, planned, by_kind=by_kind)
    table.write(tmp_path / "phases.json", stages=2)
    written = json.loads((tmp_path / "phases.json").read_text())
    assert written["planned"]["seconds"] == [[8.0, 8.0]] * 4
    of_kinds = {"full": {"seconds": [[6.0, 6.0]] * 4}, "window 1,024": {"seconds": [[2.0, 2.0]] * 4}}
    assert written["planned_by_kind"] == of_kinds
    plot_phases(tmp_path / "phases.svg", table, stages=2)
    text = (tmp_path / "phases.svg").read_text()
    assert "layers of kind full: 75 % of it" in text and "layers of kind window 1,024: 25 % of it" in text
    only = PhaseTable(["full"])
    only.add(planned, planned, planned, by_kind=planned[None])
    assert only.planned_by_kind() == {}


def test_parts_stay_with_their_rank_when_the_slowest_comes_first() -> None:
    phases = np.array([[[1.0, 5.0], [2.0, 0.0]], [[0.0, 2.0], [4.0, 2.0]]])  # totals 1 7, 6 2: mean of all phases 8
    np.testing.assert_allclose(slowest_first(phases), [[7 / 8, 1 / 8], [6 / 8, 2 / 8]])
    np.testing.assert_allclose(slowest_first(np.zeros((2, 1, 3))).sum(axis=0), 1.0)


def test_attention_at_home_has_no_planned_phases(tmp_path: Path) -> None:
    table = PhaseTable()
    table.add(np.ones((2, 1)), None, None)
    table.write(tmp_path / "phases.json", stages=1)
    written = json.loads((tmp_path / "phases.json").read_text())
    assert written["steps"] == 1 and written["measured"]["seconds"] == [[1.0]] * 2
    assert "planned" not in written and "at_home" not in written
