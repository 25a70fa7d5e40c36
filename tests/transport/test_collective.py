"""The transport's refusals; that it moves rows right is tested with the runtime."""

import pytest

from distca.errors import PlanError
from distca.plan import AttentionKind, lay_out, plan_at_home, route
from distca.testing.ranks import run_ranks

KINDS = [AttentionKind(1.0)]


def _launch_a_plan_for_another_world() -> str:
    import torch
    import torch.distributed as dist

    from distca.errors import TransportError
    from distca.runtime.device_routes import ServerRoute
    from distca.transport import Part, choose_transport

    plan = plan_at_home(lay_out([40, 3], 4)[0])
    moves = ServerRoute.of(route(plan, dist.get_rank()), KINDS, "cpu").q_to_server
    rows = torch.zeros(moves.source_rows, 1)
    transport = choose_transport("auto", dist.group.WORLD)
    try:
        transport.launch((Part(rows, rows.clone(), moves),))
    except TransportError as error:
        return str(error)
    return ""


def test_a_plan_for_another_world_size_is_refused_before_anything_is_sent() -> None:
    said = "The plan was made for 4 ranks, but the server pool has 2; plan again for this world size."
    assert run_ranks(2, _launch_a_plan_for_another_world) == [said, said]


def test_rows_that_do_not_lie_one_after_the_other_are_no_part() -> None:
    import torch

    from distca.runtime.device_routes import ServerRoute
    from distca.transport import Part

    moves = ServerRoute.of(route(plan_at_home(lay_out([6], 1)[0]), 0), KINDS, "cpu").q_to_server
    rows = torch.zeros(4, 6).t()
    with pytest.raises(AssertionError):
        Part(rows, torch.zeros(6, 4), moves)
    with pytest.raises(AssertionError):
        Part(torch.zeros(6, 4), rows, moves)


def test_a_rank_beyond_the_plan_is_refused() -> None:
    with pytest.raises(PlanError, match="Rank 4 has no part in the plan, which was made for 4 ranks"):
        route(plan_at_home(lay_out([40, 3], 4)[0]), 4)
