import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distca.plan import analytic_cost, area_cost
from distca.plan.cost.pool import ServerWork
from distca.plan.geometry import range_pairs
from distca.plan.scheduler.range_split import Excess, Receivers, Timer, split_range

LLAMA_8B = analytic_cost(32, 8, 128)


def offered(start: int, stop: int, share: float, rooms: list[float], cost=LLAMA_8B):
    """A piece of which ``share`` should leave, to receivers with rooms as shares of the piece's seconds."""
    seconds = cost.per_direction("both", np.array([stop - start]), np.array([stop]))[:, 0]
    count = len(rooms)
    receivers = Receivers(
        np.arange(count),
        seconds[:, None] * np.array(rooms),
        np.zeros(count),
        lambda low, ends, chosen: 4.0 * (ends[:, -1] - low) + ends.sum(axis=1),
    )
    timer = Timer(ServerWork("both", (cost,)), seconds.tolist())
    return Excess(start, stop, seconds.tolist(), (share * seconds).tolist()), receivers, timer


@given(
    st.integers(0, 60_000),
    st.integers(1, 60_000),
    st.floats(0.001, 1.0),
    st.lists(st.floats(0.001, 1.0), min_size=1, max_size=6),
    st.sampled_from((LLAMA_8B, area_cost(4, 1, 2))),
)
def test_a_band_lies_in_its_piece_and_fits_everyone(start, rows, share, rooms, cost) -> None:
    excess, receivers, timer = offered(start, start + rows, share, sorted(rooms, reverse=True), cost)
    split = split_range(excess, receivers, timer)
    if split is None:
        return
    assert excess.start <= split.cuts[0] and split.cuts[-1] <= excess.stop
    assert (np.diff(split.cuts) > 0).all()
    assert len(set(split.chosen)) == len(split.chosen) == len(split.cuts) - 1
    assert (split.moved <= receivers.room[:, split.chosen] * (1 + 1e-9)).all()
    edges = np.array([excess.start, *split.cuts, excess.stop])
    seconds = cost.per_direction("both", np.diff(edges), edges[1:])
    np.testing.assert_allclose(split.moved, seconds[:, 1:-1])
    np.testing.assert_allclose(split.kept, seconds[:, [0, -1]])


def test_a_long_document_meets_the_need_with_its_inner_rows() -> None:
    excess, receivers, timer = offered(0, 100_000, 0.05, [0.2])
    split = split_range(excess, receivers, timer)
    assert split is not None
    assert (excess.seconds - np.sum(split.kept, axis=1) >= excess.need).all()
    middle = np.mean(split.cuts)
    # (Q + K/2) / K is 4.5 here, and the pairs are 5 % of the document's.
    best = np.sqrt(4.5 * 0.05 * float(range_pairs(0, 100_000)))
    assert abs(middle / best - 1) < 0.15


def test_every_receiver_gets_one_range_and_the_short_ones_come_first() -> None:
    excess, receivers, timer = offered(0, 100_000, 0.5, [0.2, 0.2, 0.15, 0.12])
    split = split_range(excess, receivers, timer)
    assert split is not None
    assert len(split.chosen) == 3
    assert (np.sum(split.kept, axis=1) <= 0.51 * np.array(excess.seconds)).all()
    assert (np.diff(split.moved[0]) > -0.02 * excess.seconds[0]).all()


def test_a_cut_that_costs_more_than_it_brings_is_refused() -> None:
    excess, receivers, timer = offered(90_000, 90_400, 0.5, [0.6])
    assert split_range(excess, receivers, timer) is None
