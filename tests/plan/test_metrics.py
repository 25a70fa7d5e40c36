import numpy as np
from hypothesis import given

from distca.plan import Plan, area_cost, imbalance, server_seconds, traffic
from tests.plan.cases import arbitrary_plans, routes


@given(arbitrary_plans())
def test_counted_rows_are_the_rows_the_routes_carry(plan: Plan) -> None:
    counted = traffic(plan)
    ranks = plan.layout.ranks
    for rank, part in enumerate(routes(plan)):
        assert np.array_equal(counted.q[rank], part.q.send.per_peer(ranks))
        assert np.array_equal(counted.kv[rank], part.kv.send.per_peer(ranks))
        assert np.array_equal(counted.q[:, rank], part.q.receive.per_peer(ranks))
        assert np.array_equal(counted.kv[:, rank], part.kv.receive.per_peer(ranks))
    assert counted.q_rows == counted.q.sum()
    assert counted.kv_rows == counted.kv.sum()


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
