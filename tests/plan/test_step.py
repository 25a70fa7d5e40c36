"""A step's plan: the only schedule of its length, in the order that keeps fewest micro-batches in flight; its phases'
plans, and how level they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest

from distca.errors import PlanError
from distca.plan import (
    AttentionKind,
    Layout,
    Links,
    Plan,
    PlanOptions,
    StepPlan,
    analytic_cost,
    area_cost,
    lay_out,
    plan_at_home,
    plan_step,
    server_seconds,
)
from distca.plan.cost.analytic import cost_of_kind
from distca.plan.cost.linear import NonAttention
from distca.plan.cost.model import Direction
from distca.plan.cost.pool import PoolCost, at_speeds
from distca.plan.cost.travelling import with_travel
from distca.plan.metrics import traffic
from distca.plan.plan import fingerprint

COST = analytic_cost(4, 2, 32)
LENGTHS = ([9000, 130, 77, 2049, 1, 4000], [700, 5000, 5000, 300, 12])
STAGES = PlanOptions(3, COST, stages=2, nano_batches=2, resend=True, tolerance=0.02)


def _plan(stages: int, micro_batches: int) -> StepPlan:
    options = PlanOptions(1, COST, stages=stages, resend=stages > 1)
    return plan_step([[3, 5 + number] for number in range(micro_batches)], options)


def _assignments(stages: int, micro_batches: int, phases: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to give each stage a phase for each micro-batch: one micro-batch at a time, and each after the stage
    before it. Micro-batches are named in the order of the first stage."""

    def later(stage: int, before: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
        if stage == stages:
            yield ()
            return
        for mine in permutations(range(phases), micro_batches):
            if all(here > there for here, there in zip(mine, before, strict=True)):
                yield from ((mine, *rest) for rest in later(stage + 1, mine))

    for first in combinations(range(phases), micro_batches):
        yield from ((first, *rest) for rest in later(1, first))


@pytest.mark.parametrize("stages,micro_batches", [(1, 3), (2, 1), (2, 4), (3, 1), (3, 4), (4, 3), (4, 4)])
def test_no_other_schedule_takes_as_few_phases(stages: int, micro_batches: int) -> None:
    plan = _plan(stages, micro_batches)
    assert not list(_assignments(stages, micro_batches, len(plan.forward) - 1)), "none takes fewer"
    ours = tuple(tuple(plan.forward_phase(m, stage) for m in range(micro_batches)) for stage in range(stages))
    assert list(_assignments(stages, micro_batches, len(plan.forward))) == [ours]
    # Backward is the same from the last stage to the first.
    back = tuple(
        tuple(plan.backward_phase(m, stage) for m in range(micro_batches)) for stage in reversed(range(stages))
    )
    assert len(plan.backward) == len(plan.forward) and back == ours
    for phases, phase_of in ((plan.forward, plan.forward_phase), (plan.backward, plan.backward_phase)):
        for number, phase in enumerate(phases):
            for stage, micro_batch in enumerate(phase.micro_batches):
                due = [m for m in range(micro_batches) if phase_of(m, stage) == number]
                assert ([] if micro_batch is None else [micro_batch]) == due


def _peaks(order: list[str], stages: int, micro_batches: int) -> np.ndarray | None:
    """[stages] most micro-batches in flight; None where a backward would run before its forward.

    Whatever the micro-batches' order, stage s has behind it n - s forwards after n forward phases, and k - (p - 1 - s)
    backwards after k backward phases.
    """
    stage = np.arange(stages)
    done, peaks = {"forward": 0, "backward": 0}, np.zeros(stages, np.int64)
    for direction in order:
        done[direction] += 1
        forwards = np.clip(done["forward"] - stage, 0, micro_batches)
        backwards = np.clip(done["backward"] - (stages - 1 - stage), 0, micro_batches)
        # On the last stage a backward follows its forward; the others wait for its gradient anyway.
        if backwards[-1] > forwards[-1]:
            return None
        peaks = np.maximum(peaks, forwards - backwards)
    return peaks


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4])
def test_no_other_order_of_phases_keeps_fewer_in_flight(stages: int, micro_batches: int) -> None:
    plan = _plan(stages, micro_batches)
    order: list[str] = [direction for direction, _ in plan.order()]
    for wanted in ("forward", "backward"):
        assert [number for direction, number in plan.order() if direction == wanted] == list(range(len(plan.forward)))
    ours = _peaks(order, stages, micro_batches)
    assert ours is not None
    assert ours.tolist() == [min(2 * (stages - 1 - stage) + 1, micro_batches) for stage in range(stages)]
    phases = len(plan.forward)
    for forwards in combinations(range(2 * phases), phases):
        other = _peaks(["forward" if at in forwards else "backward" for at in range(2 * phases)], stages, micro_batches)
        assert other is None or (other >= ours).all()


def _columns(layouts: tuple[Layout, ...]) -> list[list[int]]:
    return [column.tolist() for layout in layouts for column in (*layout.q.columns(), *layout.kv.columns())]


def test_halves_are_dealt_evenly_and_spread_and_before_is_in_order_and_at_home() -> None:
    made = plan_step(LENGTHS, STAGES)
    at_home = []
    for lengths, layouts in zip(LENGTHS, made.layouts, strict=True):
        spread = lay_out(lengths, 3, nano_batches=2, dealing="even", placement="spread_by_nano_batch", cost=COST)
        assert _columns(layouts) == _columns(spread)
        (packed,) = lay_out(lengths, 3)
        at_home.append([server_seconds(plan_at_home(packed), COST, way) for way in ("forward", "backward")])
    (f0, b0), (f1, b1), idle = *at_home, np.zeros(3)
    forward = [[f0, idle], [f1, f0], [idle, f1]]
    backward = [[idle, b0], [b0, b1], [b1, idle]]
    expected = [np.concatenate(stages) for stages in (*forward, *backward)]
    np.testing.assert_allclose(made.balance().seconds_before, expected)


@pytest.mark.parametrize("stages,resend", [(1, False), (1, True), (2, True)])
def test_seconds_bytes_and_fingerprint_are_those_of_the_plans(stages: int, resend: bool) -> None:
    made = plan_step(LENGTHS, PlanOptions(3, COST, stages=stages, nano_batches=2, resend=resend, tolerance=0.02))
    balance, moved = made.balance(), 0
    assert len(made.phases) == 2 * (len(LENGTHS) + stages - 1)
    for number, (direction, phase) in enumerate(made.phases):
        seconds = sum(server_seconds(plan, COST, direction) for plan in phase.plans)
        np.testing.assert_allclose(balance.seconds_after[number], seconds)
        q_bytes, kv_bytes = COST.shape.moved_bytes(direction, resend=resend)
        moved += sum(traffic(plan).q_rows * q_bytes + traffic(plan).kv_rows * kv_bytes for plan in phase.plans)
        for plan in phase.plans:
            plan.check()
    assert balance.bytes_moved == moved > 0
    assert made.fingerprint == fingerprint(plan for _, phase in made.phases for plan in phase.plans)
    assert made.tokens == sum(map(sum, LENGTHS))
    keeps = stages == 1 and not resend
    assert all((back is there) == keeps for there, back in zip(made.forward, made.backward, strict=True))


def test_balance_of_a_mixed_stack_is_that_of_its_kinds() -> None:
    kinds = (AttentionKind(1.0), AttentionKind(1.0, window=500))
    costs = tuple(cost_of_kind(kind, COST) for kind in kinds)
    options = PlanOptions(3, COST, nano_batches=2, kinds=kinds, costs=costs, layer_kinds=((1, 1, 0),))
    made = plan_step(LENGTHS, options)
    balance = made.balance()
    for number, (kind,) in enumerate(options.combinations):
        alone, share = made.of_combination(number).balance(), (1 / 3, 2 / 3)[kind]
        assert not alone.after_by_kind[1 - kind].any() and alone.seconds_after.all()
        np.testing.assert_allclose(balance.after_by_kind[kind], share * alone.seconds_after)
        np.testing.assert_allclose(balance.before_by_kind[kind], share * alone.seconds_before)
    np.testing.assert_allclose(balance.seconds_after, balance.after_by_kind.sum(axis=0))


def test_attention_at_home_is_computed_by_every_stage() -> None:
    homes = [np.arange(len(lengths)) % 3 for lengths in LENGTHS]
    made = plan_step(LENGTHS, PlanOptions(3, area_cost(), stages=2, disaggregate=False), homes)
    balance = made.balance()
    assert balance.bytes_moved == 0
    np.testing.assert_array_equal(balance.seconds_before, balance.seconds_after)
    wanted = [sum(n * (n + 1) / 2 for n in lengths) for lengths in LENGTHS]
    stages = balance.seconds_after.reshape(2, 3, 2, 3).sum(axis=3)
    assert stages[0].tolist() == [[wanted[0], 0], [wanted[1], wanted[0]], [0, wanted[1]]]
    assert stages[1] == pytest.approx(2.5 * np.array([[0, wanted[0]], [wanted[0], wanted[1]], [wanted[1], 0]]))


def test_idle_stages_take_more_attention_where_time_is_levelled() -> None:
    # By pairs, so that rows are fine enough for any shares.
    options = PlanOptions(3, area_cost(), stages=2, nano_batches=2, resend=True, tolerance=0.02)
    attention = plan_step(LENGTHS, options).balance()
    per_row = float(attention.seconds_after[:3].sum()) / sum(map(sum, LENGTHS)) / 4
    options = PlanOptions(
        3,
        area_cost(),
        stages=2,
        nano_batches=2,
        resend=True,
        tolerance=0.02,
        non_attention=NonAttention(per_row, 2 * per_row),
    )
    time = plan_step(LENGTHS, options).balance()
    assert not attention.other_seconds.any()
    for phase, (made, other) in enumerate(zip(time.seconds_after, time.other_seconds, strict=True)):
        first, second = made[:3], made[3:]
        rows = np.array([sum(LENGTHS[0]), sum(LENGTHS[1])])
        own = np.add.reduceat(other, [0, 3]) / per_row
        # Forward phases run micro-batches 0; 1 and 0; 1 on stages 0 and 1, backward phases the other way round.
        wanted = [[rows[0], 0], [rows[1], rows[0]], [0, rows[1]], [0, 2 * rows[0]], 2 * rows, [2 * rows[1], 0]]
        assert own == pytest.approx(np.array(wanted[phase]))
        both = made + other
        assert both.max() <= 1.03 * both.mean(), "linear layers and attention together are level"
        idle = {0: second, 2: first, 3: first, 5: second}.get(phase)
        if idle is not None:
            assert idle.min() > 1.2 * (made.sum() - idle.sum()) / 3
    assert _over(time.seconds_after + time.other_seconds) < _over(attention.seconds_after + time.other_seconds)


@pytest.mark.parametrize("seconds_of_rows", [0.0, 500.0])
def test_stages_may_have_servers_of_unlike_speed(seconds_of_rows: float) -> None:
    speeds = np.array([1.0, 1.0, 0.5, 2.0])
    linear = NonAttention(seconds_of_rows, 2 * seconds_of_rows, tuple(1 / speeds)) if seconds_of_rows else None
    options = replace(STAGES, ranks=2, cost=at_speeds(area_cost(), speeds.tolist()), non_attention=linear)
    balance = plan_step(LENGTHS, options).balance()
    seconds = balance.seconds_after + balance.other_seconds
    least = (seconds * speeds).sum(axis=1) / speeds.sum()
    assert (seconds.max(axis=1) <= 1.03 * least).all()
    assert (balance.seconds_before.max(axis=1) > 1.2 * least).all()


def test_stages_may_have_homes_whose_linear_layers_alone_are_slower() -> None:
    linear = NonAttention(500.0, 1000.0, (1.0, 1.0, 2.0, 1.0))
    balance = plan_step(LENGTHS, replace(STAGES, ranks=2, cost=area_cost(), non_attention=linear)).balance()
    seconds = balance.seconds_after + balance.other_seconds
    assert (seconds.max(axis=1) <= 1.03 * seconds.mean(axis=1)).all()


def test_only_ranks_of_idle_stages_wait_for_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[bool]] = []

    def noted(cost: PoolCost, has_rows: np.ndarray, rate: np.ndarray, **how: bool) -> PoolCost:
        seen.append(has_rows.tolist())
        return with_travel(cost, has_rows, rate, **how)

    monkeypatch.setattr("distca.plan.phases.with_travel", noted)
    kinds, cost = (AttentionKind(1.0), AttentionKind(1.0, window=500)), at_speeds(COST, [1, 1, 1, 1, 0.5, 1])
    costs = tuple(cost_of_kind(kind, cost) for kind in kinds)
    linear = NonAttention(1e-7, 2e-7)
    plan_step(
        LENGTHS, replace(STAGES, cost=cost, kinds=kinds, costs=costs, layer_kinds=((1,), (0,)), non_attention=linear)
    )
    # Of three phases in each direction both stages run in the middle one. Each phase has two nano-batches.
    first, second = [True] * 3 + [False] * 3, [False] * 3 + [True] * 3
    assert seen == [first] * 2 + [second] * 4 + [first] * 2


def _over(seconds: np.ndarray) -> float:
    return float(seconds.max(axis=1).sum())


@pytest.mark.parametrize("stages", [1, 2])
def test_options_reach_the_scheduler(stages: int) -> None:
    def made(**options: object) -> StepPlan:
        lengths = ((400, 3, 10, 210), (300, 310, 20, 1), (660,))
        how = PlanOptions(4, area_cost(4, 2, 8), stages=stages, nano_batches=2, resend=stages > 1, **options)  # type: ignore[arg-type]
        return plan_step(lengths, how)

    level, loose = made(tolerance=0.02), made(tolerance=0.9)
    assert loose.balance().bytes_moved < level.balance().bytes_moved and loose.fingerprint != level.fingerprint
    near = made(tolerance=0.02, links=Links(2))
    node = np.arange(4 * stages) // 2
    between = [
        sum(
            far.q_rows + far.kv_rows
            for far in (traffic(plan).between(node) for _, phase in plan.phases for plan in phase.plans)
        )
        for plan in (near, level)
    ]
    assert near.fingerprint != level.fingerprint and (stages == 1 or between[0] < between[1])
    asked: list[Direction] = []

    def at_home(layout: Layout, direction: Direction) -> Plan:
        asked.append(direction)
        return plan_at_home(layout)

    made(scheduler=at_home)
    assert set(asked) == ({"both"} if stages == 1 else {"forward", "backward"})


def test_mistakes_are_sentences() -> None:
    with pytest.raises(PlanError, match="at least one micro-batch"):
        plan_step([], STAGES)
    for homes in ([], [[0], [0]]):
        with pytest.raises(PlanError, match=rf"homes are for {len(homes)} micro-batches, and the step has 1"):
            plan_step([[5]], PlanOptions(1, COST), homes)
    with pytest.raises(PlanError, match="backward is keep, but with 2 pipeline stages"):
        PlanOptions(3, COST, stages=2)
    with pytest.raises(PlanError, match="at least one rank and one stage, not 0 and 1"):
        PlanOptions(0, COST)
    for align, shares in ((0, 1), (3, 2), (1, 2), (4, 0), (-2, 2)):
        with pytest.raises(
            PlanError, match=rf"align is {align} and shares is {shares}; .* align to a multiple of shares"
        ):
            PlanOptions(3, COST, align=align, shares=shares)
    with pytest.raises(PlanError, match="kinds is empty"):
        PlanOptions(3, COST, kinds=())
    for rates in ((float("inf"),), (1.0, 1.0)):
        with pytest.raises(
            PlanError, match=r"`server_gb_s` is .*; give a finite number above 0 for each of the 1 servers"
        ):
            PlanOptions(3, COST, servers=1, server_gb_s=rates)
    assert [STAGES.pool_rank(stage, rank) for stage in range(2) for rank in range(3)] == list(range(STAGES.pool_ranks))
