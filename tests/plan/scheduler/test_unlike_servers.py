"""Servers that are not alike: each takes its own time for a task, and may have other work meanwhile."""

import time
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.data.mixes import sample_lengths, sample_mix
from distca.errors import PlanError
from distca.plan import (
    CostModel,
    Layout,
    PlanOptions,
    TableCost,
    analytic_cost,
    area_cost,
    lay_out,
    makespan_bound,
    plan_at_home,
    plan_step,
    schedule,
    server_seconds,
)
from distca.plan.cost.linear import NonAttention
from distca.plan.cost.pool import PoolCost, ServerWork
from distca.plan.cost.scaled import ScaledCost, scaled
from distca.plan.kinds import AttentionKind
from distca.plan.scheduler import scheduler
from distca.plan.scheduler.target_load import TargetLoad
from tests.plan.cases import layouts

LLAMA_8B = analytic_cost(32, 8, 128)
ROWS = np.array([128, 1024, 8192, 65536])


def other_table(cost: CostModel = LLAMA_8B) -> TableCost:
    """A GPU that takes 1.5 times as long for long ranges and 4 times for short ones, more in backward."""
    grid = np.meshgrid(ROWS.astype(float), ROWS.astype(float), indexing="ij")
    slow = np.where(grid[0] <= grid[1], np.array([4.0, 3.0, 2.0, 1.5])[:, None], np.nan)
    return TableCost(cost.shape, ROWS, ROWS, cost.forward(*grid) * slow, cost.backward(*grid) * slow * 1.2)


TABLES = (LLAMA_8B, ScaledCost(LLAMA_8B, 2.0, 3.0), other_table())


def slowest_in_all(plan, cost: CostModel, others: dict[str, np.ndarray]) -> float:
    return sum(float((server_seconds(plan, cost, way) + other).max()) for way, other in others.items())


@settings(max_examples=8)
@given(layouts(), st.data(), st.sampled_from(("forward", "backward", "both")), st.booleans())
def test_every_row_is_computed_once_and_nobody_is_slower_than_at_home(
    found: tuple[Layout, ...], data: st.DataObject, direction: str, busy: bool
) -> None:
    ways = ("forward", "backward") if direction == "both" else (direction,)
    for layout in found:
        of_server = data.draw(st.lists(st.integers(0, 2), min_size=layout.ranks, max_size=layout.ranks))
        cost = PoolCost(TABLES, tuple(of_server))
        parts = data.draw(st.lists(st.sampled_from((0.0, 0.5, 3.0)), min_size=layout.ranks, max_size=layout.ranks))
        home = plan_at_home(layout)
        others = {way: busy * np.array(parts) * server_seconds(home, cost, way).mean() for way in ways}
        other = np.stack(list(others.values())) if busy else None
        plan = schedule(layout, cost, direction=direction, other_seconds=other)
        plan.check()
        assert (
            plan.tasks.columns()[3].tolist()
            == schedule(layout, cost, direction=direction, other_seconds=other).tasks.server.tolist()
        )
        before, after = (slowest_in_all(each, cost, others) for each in (home, plan))
        assert after <= before * (1 + 1e-9)


@settings(max_examples=25)
@given(layouts(), st.data())
def test_no_server_is_done_later_than_the_pool_where_rows_are_fine_enough(
    found: tuple[Layout, ...], data: st.DataObject
) -> None:
    for layout in found:
        factors = data.draw(st.lists(st.sampled_from((1, 2, 5)), min_size=layout.ranks, max_size=layout.ranks))
        kinds = sorted({1, *factors})
        cost = PoolCost(tuple(scaled(area_cost(), f, f) for f in kinds), tuple(kinds.index(f) for f in factors))
        plan = schedule(layout, cost, direction="forward", tolerance=0.05)
        plan.check()
        seconds = server_seconds(plan, cost, "forward")
        work = server_seconds(plan_at_home(layout), area_cost(), "forward").sum()
        together = work / sum(1 / f for f in factors)
        longest = int(layout.last.max(initial=0))
        # A row of the longest document is the finest thing there is to move.
        assert (seconds <= 1.05 * together + 2 * longest * np.array(factors)).all()
        assert makespan_bound(layout, cost, "forward") <= seconds.max(initial=0) * (1 + 1e-9)


@pytest.mark.parametrize("mix", ["pretrain", "prolong"])
@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
def test_one_of_four_at_half_speed_is_given_half_the_work(mix: str, direction: str) -> None:
    (layout,) = lay_out(sample_lengths(mix, 4 * 131_072, seed=0), 4, placement="spread", cost=LLAMA_8B)
    cost = PoolCost((LLAMA_8B, scaled(LLAMA_8B, 2.0, 2.0)), (0, 0, 1, 0))
    unequal, equal = schedule(layout, cost, direction=direction), schedule(layout, LLAMA_8B, direction=direction)
    for way in ("forward", "backward") if direction == "both" else (direction,):
        seconds = server_seconds(unequal, cost, way)
        assert seconds.max() <= 1.03 * server_seconds(plan_at_home(layout), LLAMA_8B, way).sum() / 3.5
        assert seconds.max() <= 0.75 * server_seconds(equal, cost, way).max()
    assert plan_work(unequal)[2] == pytest.approx(plan_work(unequal).sum() / 7, rel=0.04)


@pytest.mark.parametrize("resend", [False, True])
def test_plans_for_many_servers_are_level_soon_and_begin_anew_with_every_step(resend: bool) -> None:
    homes = servers = 64
    cost = PoolCost((LLAMA_8B, scaled(LLAMA_8B, 2.0, 4.0)), (0,) * homes + (1,) * servers)
    lengths = [sample_mix("prolong", homes * 65_536, 2, context=131_072)]
    options = PlanOptions(homes, cost, nano_batches=2, servers=servers, tolerance=0.02, resend=resend)
    began = time.process_time()
    plan = plan_step(lengths, options)
    # 0.1 s of one core by itself.
    assert time.process_time() - began < 1.0
    assert plan.fingerprint == plan_step(lengths, options).fingerprint
    for direction, phase in plan.phases:
        for half in phase.plans:
            seconds = server_seconds(half, options.server_cost, direction)
            bound = makespan_bound(half.layout, options.server_cost, direction)
            # Cuts add work, in backward 1.13 of the bound; with keep forward has the servers of backward.
            assert seconds.max() <= bound * (1.15 if direction == "backward" else 1.26 - 0.22 * resend)


def test_the_second_half_begins_at_the_growth_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = PoolCost((LLAMA_8B, scaled(LLAMA_8B, 2.0, 4.0)), (0,) * 16 + (1,) * 16)
    seen: list[dict] = []
    schedule_unlike = scheduler.schedule_unlike

    def noted(*given):
        seen.append(dict(given[-1]))
        return schedule_unlike(*given)

    monkeypatch.setattr(scheduler, "schedule_unlike", noted)
    options = PlanOptions(16, cost, nano_batches=2, servers=16)
    for _ in range(2):
        plan_step([sample_mix("prolong", 16 * 65_536, 2, context=131_072)], options)
    assert [list(each) for each in seen] == [[], ["both"], [], ["both"]]
    assert (seen[1]["both"] >= 1).all()


def plan_work(plan) -> np.ndarray:
    return server_seconds(plan, LLAMA_8B, "both")


def test_a_move_is_priced_by_the_receiving_servers_table() -> None:
    cost = PoolCost((LLAMA_8B, other_table()), (0, 0, 1))
    (layout,) = lay_out([40_000, 30_000, 500, 300, 200], 3, rank_of=[0, 1, 2, 2, 2])
    plan = schedule(layout, cost, direction="backward", tolerance=0.02)
    seconds = server_seconds(plan, cost, "backward")
    assert seconds.max() <= 1.03 * seconds.mean()
    own = plan.tasks.take(plan.tasks.server == 2)
    table = other_table().backward(own.stop - own.start, own.stop).sum()
    assert seconds[2] == pytest.approx(table) and table > 1.5 * LLAMA_8B.backward(own.stop - own.start, own.stop).sum()


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from((0.0, 1.0, 4.0)), min_size=2, max_size=3),
    st.lists(st.sampled_from((0.0, 0.5, 9.0)), min_size=3, max_size=3),
    st.lists(st.sampled_from((1.0, 2.0)), min_size=3, max_size=3),
    st.lists(st.sampled_from((1.0, 3.0)), min_size=3, max_size=3),
)
def test_no_shares_give_both_directions_less_time(
    ahead: list[float], behind: list[float], forward: list[float], backward: list[float]
) -> None:
    count = len(ahead)
    other = np.array([ahead, behind[:count]])
    slowness = np.array([forward[:count], backward[:count]])
    slowness *= (1 / slowness).mean(axis=1, keepdims=True)
    mean = np.array([1.0, 2.5])
    load = TargetLoad(count, other, slowness, mean)
    limits = load.seconds_of(load.of(mean)) + np.where(load.of(mean) > 0, other, 0.0)
    times = np.maximum(limits.max(axis=1), other.max(axis=1))
    assert (load.of(mean) / (mean[:, None] * count)).min(axis=0).sum() >= 1 - 1e-6
    # All shares in hundredths: none is better, and what was found is nearly as good as the best of them.
    shares = [each for each in product(range(101), repeat=count - 1) if sum(each) <= 100]
    share = np.array([(*each, 100 - sum(each)) for each in shares]) / 100
    done = other[:, None] + slowness[:, None] * (mean * count)[:, None, None] * share
    best = done.max(axis=2).sum(axis=0).min()
    assert best * 0.98 - 0.05 <= times.sum() <= best * (1 + 1e-4)


def test_with_no_other_work_servers_get_work_by_speed() -> None:
    slowness = np.array([[0.75, 0.75, 1.5, 1.5]]) * np.mean(1 / np.array([0.75, 0.75, 1.5, 1.5]))
    load = TargetLoad(4, None, slowness, np.array([6.0]))
    np.testing.assert_allclose(load.of(np.array([6.0]))[0], np.array([8.0, 8.0, 4.0, 4.0]))
    np.testing.assert_allclose(load.seconds_of(load.of(np.array([6.0]))), 6.0)


def test_nothing_moves_that_is_computed_while_the_slowest_homes_linear_layers_are() -> None:
    """A home with little attention and much other work keeps all others waiting: they need not be level."""
    (layout,) = lay_out([8000, 8100, 8200, 100], 4, rank_of=[0, 1, 2, 3])
    cost = PoolCost((LLAMA_8B,), (0,) * 4)
    at_home = server_seconds(plan_at_home(layout), LLAMA_8B, "forward")
    other = [0.0, 0.0, 0.0, 3 * at_home.max()]
    tasks = schedule(layout, cost, direction="forward", other_seconds=other).tasks
    assert (np.bincount(tasks.server, minlength=4)[:3] >= 1).all()
    moved = tasks.server[tasks.document < 3] != tasks.document[tasks.document < 3]
    assert not moved.any()


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("time", [False, True])
def test_servers_without_rows_take_what_their_speed_allows(stages: int, time: bool) -> None:
    homes, servers = 4, 2
    slow = scaled(LLAMA_8B, 2.0, 2.0)
    cost = PoolCost((LLAMA_8B, slow), (0,) * homes * stages + (1,) * servers)
    lengths = [sample_mix("pretrain", homes * 65_536, seed, context=65_536) for seed in range(2)]
    options = PlanOptions(
        homes,
        cost,
        stages=stages,
        resend=stages > 1,
        nano_batches=2,
        servers=servers,
        non_attention=NonAttention(1e-7, 2e-7) if time else None,
        tolerance=0.02,
    )
    made = plan_step(lengths, options)
    balance = made.balance()
    took = balance.seconds_after + balance.other_seconds
    assert took.shape[1] == options.pool_ranks == homes * stages + servers
    assert not balance.other_seconds[:, -servers:].any() and not balance.seconds_before[:, -servers:].any()
    for phase, (_, each) in enumerate(made.phases):
        for plan in each.plans:
            plan.check()
            assert plan.layout.ranks == options.pool_ranks and not plan.layout.q_rows[-servers:].any()
        ideal = balance.seconds_after[phase]
        work = ideal[:-servers].sum() + ideal[-servers:].sum() / 2 + balance.other_seconds[phase].sum()
        bound = max(work / (homes * stages + servers / 2), float(balance.other_seconds[phase].max()))
        assert took[phase].max() <= 1.07 * bound


def test_layers_with_windows_stay_home_beside_servers() -> None:
    kinds = (AttentionKind(1.0), AttentionKind(1.0, window=64))
    options = PlanOptions(
        3, LLAMA_8B, nano_batches=2, servers=2, kinds=kinds, layer_kinds=((1, 0),), costs=(LLAMA_8B, LLAMA_8B)
    )
    made = plan_step([[9000, 4000, 300, 200]], options)
    window, full = made.forward[0].by_combination
    assert all((plan.tasks.server < 3).all() for plan in window)
    assert all((plan.tasks.server >= 3).any() for plan in full)


def test_factors_are_those_of_homes() -> None:
    cost = PoolCost((LLAMA_8B, scaled(LLAMA_8B, 2.0, 2.0)), (0, 1))
    options = PlanOptions(2, cost, nano_batches=2, non_attention=NonAttention(1e-7, 2e-7, (1.0, 2.0)))
    other = plan_step([[4096, 4096]], options).balance().other_seconds
    np.testing.assert_allclose(other[:, 1], 2 * other[:, 0])


@pytest.mark.parametrize(
    "given_options, words",
    [
        ({"servers": -1}, "`servers` is -1"),
        ({"servers": 1, "disaggregate": False}, "0 where attention stays at home"),
        ({"servers": 1, "cost": PoolCost((LLAMA_8B,), (0, 0))}, "2 servers have a cost table, and there are 3"),
        ({"non_attention": NonAttention(1e-7, 1e-7, (1.0,))}, "has factors for 1 homes, and there are 2"),
    ],
)
def test_mistakes_are_sentences(given_options: dict, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        PlanOptions(**{"ranks": 2, "cost": LLAMA_8B} | given_options)


def test_tables_of_one_pool_are_for_the_same_heads() -> None:
    with pytest.raises(PlanError, match="measure the same heads on all"):
        PoolCost((LLAMA_8B, analytic_cost(16, 8, 128)), (0, 1))
    with pytest.raises(PlanError, match="there are 1"):
        PoolCost((LLAMA_8B,), (0, 1))
    with pytest.raises(PlanError, match="above 0"):
        scaled(LLAMA_8B, 0.0, 1.0)


def test_work_of_servers_is_counted_in_seconds_of_the_mean_one() -> None:
    cost = PoolCost(TABLES, (0, 1, 2, 1))
    rows, ends = np.array([2000, 400, 64]), np.array([30_000, 400, 9000])
    work = cost.work("both", rows, ends)
    assert work.slowness is not None
    np.testing.assert_allclose((1 / work.slowness).mean(axis=1), 1.0)
    np.testing.assert_allclose(
        work.on(2, rows, ends), TABLES[2].per_direction("both", rows, ends) / work.slowness[:, [2]]
    )
    each = work.on(np.array([1, 2, 0]), rows, ends)
    few = work.of_few((ends - rows).tolist(), ends.tolist(), [1, 2, 0])
    np.testing.assert_allclose(each, few)
    assert ServerWork("forward", (LLAMA_8B,)).same(0, 1) and not work.same(0, 1)
