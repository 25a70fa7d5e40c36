import numpy as np
import pytest

from distca.data.mixes import Mix, sample_lengths, sample_mix
from distca.plan import Layout, Links, Plan, PlanOptions, analytic_cost, lay_out, plan_step
from distca.plan.choice import Once, Price, price_of
from distca.plan.metrics import server_seconds, traffic
from distca.plan.phases import scheduler_of
from distca.plan.plan import plan_at_home

LLAMA_8B = analytic_cost(32, 8, 128)


def same(a: tuple[Layout, ...], b: tuple[Layout, ...]) -> bool:
    columns = [[column.tolist() for layout in each for column in layout.q.columns()] for each in (a, b)]
    return columns[0] == columns[1]


@pytest.mark.parametrize("mix", ["pretrain", "prolong"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_few_ranks_of_one_node_have_no_more_rows_in_both_halves_than_the_cut_needs(mix: Mix, ranks: int) -> None:
    for seed in range(4):
        lengths = sample_lengths(mix, ranks * 131_072, seed)
        ((_, pong),) = plan_step([lengths], PlanOptions(ranks, LLAMA_8B, nano_batches=2)).layouts
        # The document that the cut between halves falls on, and no other.
        assert np.count_nonzero((pong.first > 0) & (pong.last > pong.first)) <= 1


def test_a_slow_network_gets_the_layouts_with_less_to_wait_for() -> None:
    lengths = np.array([*[100_000] * 8, *[1000] * 250])
    found = [
        plan_step([lengths], PlanOptions(8, LLAMA_8B, nano_batches=2, links=links))
        for links in (Links(), Links(1, network_price=400.0))
    ]
    fast, slow = (step.layouts[0] for step in found)
    how = {"nano_batches": 2, "dealing": "lean", "cost": LLAMA_8B}
    assert same(fast, lay_out(lengths, 8, placement="spread_by_nano_batch", **how))
    assert same(slow, lay_out(lengths, 8, placement="spread", ranks_per_node=1, **how))
    assert found[1].balance().bytes_moved < found[0].balance().bytes_moved


def test_a_price_has_no_rows_of_ping_that_servers_keep_for_pong() -> None:
    lengths, links = sample_mix("prolong-long", 4 * 131_072, 5, context=524_288), Links(1, network_price=20.0)
    (chosen,) = plan_step([lengths], PlanOptions(4, LLAMA_8B, nano_batches=2, links=links)).layouts
    assert same(chosen, lay_out(lengths, 4, placement="spread", nano_batches=2, dealing="lean", cost=LLAMA_8B))


def test_a_price_is_what_the_slowest_and_the_busiest_rank_need() -> None:
    layouts = lay_out([60_000, 900, 3000], 2, nano_batches=2)
    plans = [plan_at_home(layout) for layout in layouts]
    links = Links(1, network_price=100.0)
    attention, exposed, moved = 0.0, 0.0, 0
    for direction in ("forward", "backward"):
        slowest = [server_seconds(plan, LLAMA_8B, direction).max() for plan in plans]
        attention += sum(slowest)
        for plan, other in zip(plans, slowest[::-1], strict=True):
            rows = traffic(plan).kv
            assert traffic(plan).q_rows == 0
            moved += rows.total * 4096
            exposed += max(max(rows.sent.max(), rows.received.max()) * 4096 * 100 / 360e9 - other, 0)
    assert exposed > 0
    found = price_of([(plan, plan) for plan in plans], LLAMA_8B, links, resend=False)
    assert (found.attention, found.exposed, found.bytes) == (
        pytest.approx(attention),
        pytest.approx(exposed),
        moved,
    )


@pytest.mark.parametrize("resend", [False, True])
def test_a_price_counts_the_log_sum_exp_that_travels_in_models_with_sinks(resend: bool) -> None:
    links, heads = Links(1, network_price=1e4), 4
    cost = analytic_cost(heads, 2, 8)
    (layout,) = lay_out([60_000, 900, 3000], 2)
    plans = plan_at_home(layout), scheduler_of(PlanOptions(2, cost))(layout, "both")
    for plan in plans:
        rows = traffic(plan).q
        without, found = (price_of([(plan, plan)], cost, links, resend, sinks) for sinks in (False, True))
        assert found.attention == without.attention
        # With resend it travels anyway.
        assert found.bytes - without.bytes == (0 if resend else 2 * 4 * heads * rows.total)
        assert (found.exposed > without.exposed) == (bool(rows.total) and not resend)
    assert rows.total


def test_less_to_wait_for_must_be_worth_it() -> None:
    before = Price(1.0, 0.1, 100)
    assert Price(1.0, 0.08, 100).beats(before)
    assert not Price(1.0, 0.095, 100).beats(before)
    assert not Price(1.0, 0.08, 101).beats(before)
    assert not Price(0.9, 0.0, 100).beats(Price(1.0, 0.0, 100)), "for attention alone"
    assert Price(1.0, 0.0, 0).beats(Price(1.0, 0.0, 100))
    assert not Price(1.01, 0.0, 0).beats(Price(1.0, 0.0, 100))


def test_every_layout_is_planned_once_in_each_direction_also_where_layouts_come_and_go() -> None:
    asked: list[tuple[int, str]] = []

    def scheduler(layout: Layout, direction: str, beside: np.ndarray | None = None) -> Plan:
        asked.append((layout.tokens, direction))
        return plan_at_home(layout)

    planned = Once(scheduler)
    # Each layout is given up at once, so that the next one may lie in its memory.
    found = [planned(lay_out([tokens], 2)[0], "forward").layout.tokens for tokens in range(1, 50)]
    assert found == list(range(1, 50))
    (layout,) = lay_out([7, 9], 2)
    assert planned(layout, "forward") is planned(layout, "forward") is not planned(layout, "backward")
    assert len(asked) == 49 + 2
