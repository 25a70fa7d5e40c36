"""Servers without rows of their own, whose time counts the rows that travel to them."""

from dataclasses import replace

import numpy as np
import pytest

from distca.data.mixes import sample_mix
from distca.errors import PlanError
from distca.plan import Links, PlanOptions, analytic_cost, plan_step, server_seconds
from distca.plan.cost.linear import NonAttention
from distca.plan.cost.pool import PoolCost
from distca.plan.cost.scaled import scaled
from distca.plan.cost.table_file import find_table
from distca.plan.cost.travelling import WAITED_FOR, TravellingCost, with_travel

LLAMA_8B = analytic_cost(32, 8, 128)
OPTIONS = PlanOptions(
    8, LLAMA_8B, nano_batches=2, servers=8, links=Links(8), non_attention=NonAttention(2e-7, 4e-7), tolerance=0.02
)


def served(options: PlanOptions) -> np.ndarray:
    """[servers] attention seconds of servers without a model in a step."""
    plan = plan_step([sample_mix("prolong", 8 * 65_536, 2, context=65_536)], options)
    seconds = (server_seconds(half, options.cost, way) for way, phase in plan.phases for half in phase.plans)
    return np.sum(list(seconds), axis=0)[8:]


def test_a_task_takes_longer_by_the_bytes_of_its_rows() -> None:
    cost = with_travel(
        PoolCost((LLAMA_8B, scaled(LLAMA_8B, 2.0, 2.0)), (0, 1, 0)),
        np.array([True, False, False]),
        np.array([1e9, 2e9, 1e9]),
        resend=False,
        sinks=False,
    )
    rows, ends = np.array([128, 4096, 0]), np.array([1024, 4096, 0])
    q, kv = LLAMA_8B.shape.moved_bytes("backward")
    slow, far = (table for table in cost.tables if isinstance(table, TravellingCost))
    assert cost.of_server == (0, cost.tables.index(slow), cost.tables.index(far))
    for table, factor, rate in ((slow, 2.0, 2e9), (far, 1.0, 1e9)):
        expected = factor * LLAMA_8B.backward(rows, ends) + WAITED_FOR * (rows * q + ends * kv) / rate
        np.testing.assert_allclose(table.backward(rows, ends), expected, rtol=1e-12)
        for direction in ("forward", "backward", "both"):
            each = table.per_direction(direction, rows, ends)
            np.testing.assert_allclose(table.of_few(direction, rows.tolist(), ends.tolist()), each, rtol=1e-12)


def test_a_lower_bound_holds_for_the_parts_of_a_task() -> None:
    measured = find_table("NVIDIA H200", "flash4", 32, 8, 128)
    assert measured is not None
    only = with_travel(PoolCost((measured,), (0,)), np.array([False]), np.array([1e12]), resend=False, sinks=False)
    cost, whole, ends = only.tables[only.of_server[0]], np.array([65_536]), np.array([32_768, 65_536])
    parts = cost.per_direction("both", ends - np.array([0, 32_768]), ends).sum(axis=1)
    assert parts[0] < cost.forward(whole, whole)[0]
    assert (cost.least("both", whole, whole)[:, 0] <= parts).all()
    assert (cost.least("both", whole, whole) > measured.least("both", whole, whole)).all()


def test_servers_get_less_the_slower_their_network_is() -> None:
    usual, slow, slowest = (served(replace(OPTIONS, server_gb_s=rate)).sum() for rate in ((), (10.0,) * 8, (2.0,) * 8))
    assert usual > 1.2 * slow > 1.2 * 1.2 * slowest > 0
    near = served(replace(OPTIONS, links=Links(), server_gb_s=(2.0,) * 8)).sum()
    assert near > usual
    unlike = served(replace(OPTIONS, server_gb_s=(10.0,) * 4 + (2.0,) * 4))
    assert unlike[:4].sum() > 1.2 * unlike[4:].sum()


def test_where_attention_alone_is_levelled_travel_is_not_counted() -> None:
    pairs = replace(OPTIONS, non_attention=None)
    assert np.array_equal(served(pairs), served(replace(pairs, server_gb_s=(2.0,) * 8)))


def test_a_rate_below_0_is_refused() -> None:
    with pytest.raises(PlanError, match="server_gb_s"):
        replace(OPTIONS, server_gb_s=(-1.0,) * 8)
