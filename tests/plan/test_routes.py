import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from distca.errors import PlanError
from distca.plan import Plan, Routes, lay_out, plan_at_home, route
from tests.plan.cases import arbitrary_plans, deliver, home_rows, readers, return_home, routes


@given(arbitrary_plans())
def test_every_task_finds_its_rows_and_its_whole_context(plan: Plan) -> None:
    made = routes(plan)
    q = deliver([r.q for r in made], home_rows(plan.layout, "q"))
    kv = deliver([r.kv for r in made], home_rows(plan.layout, "kv"))
    tasks = plan.tasks
    for rank, part in enumerate(made):
        mine = np.flatnonzero(tasks.server == rank)
        assert len(part.cu_q) == len(part.cu_kv) == len(mine) + 1
        for i, task in enumerate(mine.tolist()):
            document, start, stop = (int(x[task]) for x in (tasks.document, tasks.start, tasks.stop))
            wanted = [[document, position] for position in range(start, stop)]
            assert q[rank][part.cu_q[i] : part.cu_q[i + 1]].tolist() == wanted
            wanted = [[document, position] for position in range(stop)]
            assert kv[rank][part.cu_kv[i] : part.cu_kv[i + 1]].tolist() == wanted
        assert part.cu_q[-1] == len(q[rank])
        assert part.cu_kv[-1] == len(kv[rank])
        assert part.max_q == max(np.diff(part.cu_q).tolist(), default=0)
        assert part.max_kv == max(np.diff(part.cu_kv).tolist(), default=0)


@given(arbitrary_plans())
def test_what_one_rank_sends_the_other_receives(plan: Plan) -> None:
    made = routes(plan)
    for name in ("q", "kv"):
        for a, sender in enumerate(made):
            for b, receiver in enumerate(made):
                out, there = getattr(sender, name).send, getattr(receiver, name).receive
                to, came = out.peer == b, there.peer == a
                assert np.array_equal(out.source[to], there.source[came])
                assert np.array_equal(out.destination[to], there.destination[came])
                assert np.array_equal(out.rows[to], there.rows[came])
                assert a != b or not to.any()


@given(arbitrary_plans())
def test_every_rank_knows_where_its_rows_begin_at_a_receiver(plan: Plan) -> None:
    made, ranks = routes(plan), plan.layout.ranks
    for name in ("q", "kv"):
        exchanges = [getattr(part, name) for part in made]
        to_server = np.stack([each.receive.per_peer(ranks) for each in exchanges], axis=1)  # [home, server]
        to_home = np.stack([each.send.per_peer(ranks) for each in exchanges], axis=1)  # [server, home]
        for rank, each in enumerate(exchanges):
            assert each.ahead_at_server.dtype == each.ahead_at_home.dtype == np.int64
            assert each.ahead_at_server.tolist() == to_server[:rank].sum(axis=0).tolist()
            assert each.ahead_at_home.tolist() == to_home[:rank].sum(axis=0).tolist()
            assert each.most_to_server == max(other.receive.total for other in exchanges)
            assert each.most_to_home == max(other.send.total for other in exchanges)
            assert each.travelling == to_server.sum() == to_home.sum()


@given(arbitrary_plans())
def test_gradients_add_up_at_home(plan: Plan) -> None:
    made = routes(plan)
    ones = [np.ones(r.q.destination_rows) for r in made]
    assert all((home == 1).all() for home in return_home([r.q for r in made], ones))
    ones = [np.ones(r.kv.destination_rows) for r in made]
    count = readers(plan)
    for home, rows in zip(return_home([r.kv for r in made], ones), home_rows(plan.layout, "kv"), strict=True):
        assert home.tolist() == [count.get((d, p), 0) for d, p in rows.tolist()]


@settings(max_examples=25)
@given(arbitrary_plans())
def test_key_rows_travel_to_a_server_once(plan: Plan) -> None:
    for part in routes(plan):
        arrived = [
            (int(peer), row)
            for peer, source, rows in zip(
                part.kv.receive.peer, part.kv.receive.source, part.kv.receive.rows, strict=True
            )
            for row in range(source, source + rows)
        ]
        assert len(arrived) == len(set(arrived))


def test_nothing_travels_when_no_document_spans_ranks() -> None:
    (layout,) = lay_out([5, 7, 3], 3, rank_of=[0, 1, 1])
    for rank in range(3):
        part = route(plan_at_home(layout), rank)
        assert part.q.send.total == part.q.receive.total == part.kv.send.total == part.kv.receive.total == 0
        assert part.q.keep.total == layout.q_rows[rank]
    assert route(plan_at_home(layout), 2).max_q == 0


def columns(part: Any) -> list[Any]:
    """All arrays and numbers of a dataclass, those of its fields' dataclasses too."""
    if not dataclasses.is_dataclass(part):
        return [part]
    return [each for field in dataclasses.fields(part) for each in columns(getattr(part, field.name))]


@given(arbitrary_plans())
def test_the_routes_of_all_ranks_are_those_of_each(plan: Plan) -> None:
    found = Routes(plan)
    assert len(found) == plan.layout.ranks
    for together, alone in zip(found, routes(plan), strict=True):
        for one, other in zip(columns(together), columns(alone), strict=True):
            assert np.array_equal(one, other)
            assert getattr(one, "dtype", None) == getattr(other, "dtype", None)
    assert [part.rank for part in found[1:]] == list(range(1, plan.layout.ranks))


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_that_the_plan_does_not_know_is_refused(rank: int) -> None:
    plan = plan_at_home(lay_out([5, 7], 3)[0])
    with pytest.raises(PlanError, match=f"Rank {rank} has no part in the plan, which was made for 3 ranks"):
        route(plan, rank)
    with pytest.raises(PlanError, match="plan again"):
        Routes(plan)[rank]
