import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.errors import PlanError
from distca.plan.scheduler.target_load import Shares

speeds = st.lists(st.sampled_from((0.0, 0.5, 1.0, 1.3)), min_size=1, max_size=6).filter(any)


@given(st.data(), speeds, st.sampled_from((0.0, 0.2, 3.0, 40.0)))
def test_all_that_take_part_are_done_at_once_and_nobody_else_could_be_sooner(
    data: st.DataObject, speed: list[float], total: float
) -> None:
    ranks = len(speed)
    beside = np.array(data.draw(st.lists(st.sampled_from((0.0, 0.5, 1.0, 7.0)), min_size=ranks, max_size=ranks)))
    (share,) = Shares(np.array(speed), beside).of(np.array([total / sum(speed)]))
    assert share.sum() == pytest.approx(total) and (share >= 0).all()
    working = share > 1e-12
    assert not working[np.array(speed) == 0].any()
    if working.any():
        done = share[working] / np.array(speed)[working] + beside[working]
        assert np.ptp(done) < 1e-9 * (1 + done.max())
        assert (beside[~working & (np.array(speed) > 0)] >= done.max() - 1e-9).all()


def test_without_anything_beside_shares_are_as_speeds() -> None:
    means = np.array([2.0, 4.0])
    assert Shares(np.array([1.0, 2.0]), None).of(means).tolist() == [[2, 4], [4, 8]]
    assert Shares(np.array([1.0, 2.0]), [5, 5]).of(means) == pytest.approx(np.array([[2, 4], [4, 8]]))


@pytest.mark.parametrize("beside", [[1.0], [1.0, -1.0], [1.0, np.nan]])
def test_other_numbers_are_refused(beside: list[float]) -> None:
    with pytest.raises(PlanError, match="beside must be 2 seconds of 0 or more"):
        Shares(np.ones(2), beside)
