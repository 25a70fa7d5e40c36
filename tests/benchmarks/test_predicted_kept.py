"""Kept predictions of kept runs are of all of them, and as the simulator makes them."""

import pytest

from benchmarks.predicted_kept import beside, reports
from benchmarks.tables import kept
from benchmarks.traced_reductions import rates
from distca.simulate.reduction import _BESIDE_BACKWARD

SHORT = "experts_a3b_cut_two_nodes.json 1x4"


def test_all_kept_runs_were_predicted() -> None:
    assert list(kept("predicted_kept")["files"]) == [name for name, _ in reports()]


def test_predictions_are_made_anew() -> None:
    """Of a run whose reductions backward does not hide: context parallelism, which no planner has a part in."""
    before = kept("predicted_kept")["files"][SHORT]["cells"]["pretrain 64K"]["cp2-keep"]
    now = beside(dict(reports())[SHORT])["cells"]["pretrain 64K"]["cp2-keep"]
    assert now["tokens_per_s"] == pytest.approx(before["tokens_per_s"])


def test_gradients_are_reduced_beside_backward_as_in_traces() -> None:
    found = sorted(each.summed for each in rates())
    assert len(found) >= 19 and found[len(found) // 2] == pytest.approx(_BESIDE_BACKWARD, abs=0.05)
    assert all(0.9 < each.gathered < 1.1 for each in rates() if each.gathered)
