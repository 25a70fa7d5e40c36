import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distca.plan import Links, PairRows, Plan, area_cost, imbalance, server_seconds, traffic
from tests.plan.cases import arbitrary_halves, arbitrary_plans, exchanges_of, links, routes


def matrix(pairs: PairRows) -> np.ndarray:
    """[R, R] rows by home rank and server."""
    found = np.zeros((pairs.ranks, pairs.ranks), np.int64)
    found[pairs.home, pairs.server] = pairs.rows
    return found


@given(arbitrary_plans() | arbitrary_halves().map(lambda halves: halves[1]), links)
def test_counted_rows_are_the_rows_the_routes_carry(plan: Plan, links: Links | None) -> None:
    counted, made = traffic(plan, links), routes(plan, links)
    ranks = plan.layout.ranks
    assert (counted.relay.total > 0) == any(part.relay is not None for part in made)
    for exchanges, pairs in zip(exchanges_of(made), (counted.q, counted.kv, counted.relay), strict=False):
        rows = matrix(pairs)
        assert (pairs.rows > 0).all() and np.count_nonzero(rows) == len(pairs.rows)
        for rank, exchange in enumerate(exchanges):
            assert np.array_equal(rows[rank], exchange.send.per_peer(ranks))
            assert np.array_equal(rows[:, rank], exchange.receive.per_peer(ranks))
            assert (pairs.sent[rank], pairs.received[rank]) == (exchange.send.total, exchange.receive.total)
    assert counted.q_rows == counted.q.rows.sum()
    assert counted.kv_rows == counted.kv.rows.sum() + counted.relay.rows.sum() == traffic(plan).kv_rows


@given(arbitrary_plans(), st.integers(1, 3))
def test_rows_between_groups_and_of_the_busiest_rank(plan: Plan, size: int) -> None:
    counted, ranks = traffic(plan, Links(size)), plan.layout.ranks
    group = np.arange(ranks) // size
    q, kv = matrix(counted.q), matrix(counted.kv) + matrix(counted.relay)
    far = group[:, None] != group
    assert np.array_equal(matrix(counted.between(group).q), q * far)
    assert np.array_equal(matrix(counted.between(group).kv), kv * far)
    assert counted.between(group).relay.total == 0
    sent = 3 * q.sum(axis=1) + 5 * q.sum(axis=0) + 7 * kv.sum(axis=1)
    received = 3 * q.sum(axis=0) + 5 * q.sum(axis=1) + 7 * kv.sum(axis=0)
    assert counted.busiest(3, 5, 7).tolist() == np.maximum(sent, received).tolist()
    sent, received = sent + 11 * kv.sum(axis=0), received + 11 * kv.sum(axis=1)
    assert counted.busiest(3, 5, 7, 11).tolist() == np.maximum(sent, received).tolist()


@given(arbitrary_plans())
def test_seconds_are_those_of_every_row_with_its_context(plan: Plan) -> None:
    wanted = np.zeros(plan.layout.ranks)
    for start, stop, server in zip(plan.tasks.start, plan.tasks.stop, plan.tasks.server, strict=True):
        wanted[server] += sum(range(start + 1, stop + 1))
    np.testing.assert_allclose(server_seconds(plan, area_cost(), "forward"), wanted)
    np.testing.assert_allclose(server_seconds(plan, area_cost(), "both"), 3.5 * wanted)


def test_imbalance() -> None:
    assert imbalance(np.array([1.0, 3.0])) == 1.5
    assert imbalance(np.zeros(4)) == 1.0
