import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.errors import PlanError
from distca.plan.scheduler.target_load import TargetLoad


@given(st.lists(st.sampled_from((0.0, 0.5, 1.0, 7.0)), min_size=1, max_size=6), st.sampled_from((0.0, 0.2, 3.0, 40.0)))
def test_all_that_take_part_are_done_at_once_and_nobody_else_could_be_sooner(other: list[float], total: float) -> None:
    other_seconds = np.array(other)
    (target,) = TargetLoad(len(other), other_seconds).of(np.array([total / len(other)]))
    assert target.sum() == pytest.approx(total) and (target >= 0).all()
    working = target > 1e-12
    if working.any():
        done = target[working] + other_seconds[working]
        assert np.ptp(done) < 1e-9 * (1 + done.max())
        assert (other_seconds[~working] >= done.max() - 1e-9).all()


def test_with_no_other_work_or_equal_other_work_all_get_the_mean() -> None:
    means = np.array([2.0, 4.0])
    for other_seconds in (None, [5, 5]):
        np.testing.assert_allclose(*np.broadcast_arrays(TargetLoad(2, other_seconds).of(means), [[2, 2], [4, 4]]))


@pytest.mark.parametrize("other_seconds", [[1.0], [1.0, -1.0], [1.0, np.nan]])
def test_other_numbers_are_refused(other_seconds: list[float]) -> None:
    with pytest.raises(PlanError, match="other_seconds must be 2 numbers of 0 or more"):
        TargetLoad(2, other_seconds)
