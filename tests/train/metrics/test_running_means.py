"""Means over a run without its steps, against the steps themselves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.train.metrics.running_means import RunningMeans

figure = st.one_of(st.none(), st.just("text"), st.floats(-1e3, 1e3))


@given(st.lists(figure, max_size=8))
def test_largest_and_mean(column: list[object]) -> None:
    means = RunningMeans()
    for value in column:
        means.add({"loss": value, "other": 3})
    known = [value for value in column if isinstance(value, float)]
    assert means.steps == len(column)
    assert means.largest("loss") == max(known, default=None)
    if not known:
        assert means.mean("loss") is None
        return
    assert means.mean("loss") == pytest.approx(sum(known) / len(known), abs=1e-9)
    but_first = known[1:] or known
    assert means.mean("loss", but_first=True) == pytest.approx(sum(but_first) / len(but_first), abs=1e-9)
