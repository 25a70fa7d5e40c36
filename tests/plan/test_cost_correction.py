"""What was learned, as plans count with it."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from distca.plan import area_cost, imbalance, lay_out, plan_at_home
from distca.plan.cost.model import CostModel
from distca.plan.cost.table_file import find_table
from distca.plan.cost_correction import Learned, ReachCost, ServerWork, work_of
from distca.plan.micro_batch import plan_micro_batch

TABLE = find_table("NVIDIA H200", "flash4", 32, 8, 128)
assert TABLE is not None, "shipped with the package"

Direction = Literal["forward", "backward", "both"]


def test_what_lies_before_a_task_makes_it_cost_more() -> None:
    cost = ReachCost(area_cost(), 0.1)
    q_rows, kv_rows = np.array([8, 8, 1, 0]), np.array([8, 32, 10, 40])
    # Areas 36, 8 x 32 - 28 and 10; reaches 0, 3/4 and 9/10.
    assert cost.forward(q_rows, kv_rows) == pytest.approx([36, 228 * 1.075, 10 * 1.09, 0])
    backward = area_cost().backward(q_rows, kv_rows)
    assert cost.backward(q_rows, kv_rows) == pytest.approx(backward * [1, 1.075, 1.09, 1])
    assert cost.per_direction("both", q_rows, kv_rows)[1] == pytest.approx(cost.backward(q_rows, kv_rows))


def test_a_task_of_typical_reach_costs_what_the_model_says() -> None:
    cost = ReachCost(area_cost(), 0.1, typical=0.75)
    q_rows, kv_rows = np.array([8, 8]), np.array([8, 32])
    assert cost.forward(q_rows, kv_rows) == pytest.approx([36 * (1 - 0.075), 228])
    learned = Learned(np.ones(2), 0.1, 0.75).cost(area_cost())
    assert learned.forward(q_rows, kv_rows) == pytest.approx(cost.forward(q_rows, kv_rows))


def test_nothing_learned_leaves_the_cost_model_as_it_is() -> None:
    model = area_cost()
    assert Learned.nothing(3).cost(model) is model
    assert Learned.nothing(3).speeds.tolist() == [1, 1, 1]


@pytest.mark.parametrize("reach_cost", [0.25, 0.04, -0.04, -0.25])
@pytest.mark.parametrize("model", [area_cost(32, 8, 128), TABLE])
def test_no_cut_takes_less_than_the_least(model: CostModel, reach_cost: float) -> None:
    cost, random = ReachCost(model, reach_cost, 0.4), np.random.default_rng(0)
    for _ in range(300):
        stop = int(random.integers(2, 200_000))
        start = int(random.integers(0, stop))
        cuts = np.unique(random.integers(start, stop + 1, random.integers(1, 30)))
        borders = np.unique(np.concatenate(([start], cuts, [stop])))
        for direction in ("forward", "backward", "both"):
            least = cost.least(direction, np.array([stop - start]), np.array([stop])).sum(axis=1)
            cut = cost.per_direction(direction, np.diff(borders), borders[1:]).sum(axis=1)
            assert (cut >= least * (1 - 1e-9)).all()


def test_work_is_counted_by_server_without_what_was_learned() -> None:
    layout = lay_out([6, 2], 2)[0]
    plan = plan_at_home(layout)
    both = work_of([(plan, "both")], area_cost(), 2)
    twice = work_of([(plan, "forward"), (plan, "backward")], area_cost(), 2)
    assert both.seconds == pytest.approx(twice.seconds) and both.reaching == pytest.approx(twice.reaching)
    # The first rank has the first document's first four tokens, the second one the rest: reach 4 of 6 keys.
    forward = work_of([(plan, "forward")], area_cost(), 2)
    assert forward.seconds.tolist() == [10, 11 + 3]
    assert forward.reaching == pytest.approx([0, 11 * 4 / 6])
    stacked = ServerWork.of_phases([forward, both], 3)
    assert stacked.seconds.tolist() == [[10, 14] * 3, both.seconds.tolist() * 3]
    assert stacked.reaching[1].tolist() == both.reaching.tolist() * 3


@pytest.mark.parametrize("reach_cost", [0.1, -0.05])
def test_plans_are_level_by_what_was_learned(reach_cost: float) -> None:
    assert TABLE is not None
    random = np.random.default_rng(1)
    lengths = [100_000, *random.integers(500, 9_000, 18)]
    learned = Learned(np.array([0.9, 1.0, 1.05, 1.05]), reach_cost)
    made = plan_micro_batch(lengths, 4, learned.cost(TABLE), nano_batches=2, tolerance=0.005, speeds=learned.speeds)
    work = work_of(made.directed, TABLE, 4)
    really = (work.seconds + reach_cost * work.reaching) / learned.speeds
    assert really == pytest.approx(made.seconds_after / learned.speeds)
    assert imbalance(really) < 1.01
    plain = work_of(plan_micro_batch(lengths, 4, TABLE, nano_batches=2, tolerance=0.005).directed, TABLE, 4)
    assert imbalance((plain.seconds + reach_cost * plain.reaching) / learned.speeds) > 1.05
