import numpy as np
import pytest
from hypothesis import given

from distca.errors import PlanError
from distca.plan import Layout, Plan, Tasks, lay_out, plan_at_home
from tests.plan.cases import arbitrary_plans, layouts


@given(arbitrary_plans())
def test_any_complete_plan_passes_its_check(plan: Plan) -> None:
    plan.check()


@given(layouts())
def test_at_home_every_row_is_computed_where_it_lives(found: tuple[Layout, ...]) -> None:
    for layout in found:
        plan = plan_at_home(layout)
        plan.check()
        rows = np.bincount(plan.tasks.server, plan.tasks.stop - plan.tasks.start, layout.ranks)
        assert np.array_equal(rows, layout.q_rows)


@pytest.mark.parametrize(
    "start, stop, server",
    [
        ([0, 4], [4, 9], [0, 0]),  # a row missing
        ([0, 4], [6, 10], [0, 0]),  # rows twice
        ([0, 6], [4, 10], [0, 0]),  # a hole
        ([1, 6], [6, 11], [0, 0]),  # shifted
        ([0, 5], [5, 10], [0, 2]),  # a server that does not exist
        ([0, 5], [5, 10], [0, -1]),
    ],
)
def test_check_refuses_what_does_not_compute_every_row_once(
    start: list[int], stop: list[int], server: list[int]
) -> None:
    (layout,) = lay_out([10], 2)
    plan = Plan(layout, Tasks(np.zeros(2, np.int64), np.array(start), np.array(stop), np.array(server)))
    with pytest.raises(PlanError):
        plan.check()


@pytest.mark.parametrize("unknown", [-1, 2])
def test_check_names_the_server_that_is_not_there(unknown: int) -> None:
    (layout,) = lay_out([10], 2)
    tasks = Tasks(np.zeros(2, np.int64), np.array([0, 5]), np.array([5, 10]), np.array([unknown, 1]))
    with pytest.raises(PlanError, match=f"server {unknown}, .*0 to 1"):
        Plan(layout, tasks).check()
