import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.errors import PlanError
from distca.plan import Links, Plan, Route, Routes, Tasks, context_rows, lay_out, plan_at_home, route
from tests.plan.cases import (
    arbitrary_halves,
    arbitrary_plans,
    arrived,
    deliver,
    each,
    exchanges_of,
    home_rows,
    links,
    readers,
    return_home,
    routes,
    through_gateways,
)


@given(arbitrary_plans(), links)
def test_every_task_finds_its_rows_and_its_whole_context(plan: Plan, links: Links | None) -> None:
    made = routes(plan, links)
    q = deliver(made, "q", home_rows(plan.layout, "q"))
    kv = deliver(made, "kv", home_rows(plan.layout, "kv"))
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


@given(arbitrary_halves(), links)
def test_what_servers_keep_of_one_half_the_next_one_finds(halves: tuple[Plan, Plan], links: Links | None) -> None:
    ping, pong = halves
    first, second = (routes(plan, links) for plan in halves)
    there = arrived(first, "kv", home_rows(ping.layout, "kv"))
    found = deliver(second, "kv", home_rows(pong.layout, "kv"), there)
    new = arrived(second, "kv", home_rows(pong.layout, "kv"))
    tasks, bounds = pong.tasks, {(d, b) for d, b in zip(pong.layout.kv.document, pong.layout.kv.stop, strict=True)}
    kept, regions = context_rows(pong)
    for rank, buffer in enumerate(found):
        mine = np.flatnonzero(tasks.server == rank).tolist()
        wanted = [(tasks.document[task], p) for task in mine for p in range(tasks.stop[task])]
        assert [tuple(row) for row in buffer.tolist()] == wanted
        twice = {tuple(row) for row in there[rank].tolist()} & {tuple(row) for row in new[rank].tolist()}
        # Only rows of a home shard of which the server has no more than a part.
        assert not any((d, p + 1) in bounds for d, p in twice)
        assert kept[rank] == len(new[rank])
        assert regions[rank] == (len(wanted) if len(second[rank].kv.repeat) else 0)
    later = [np.zeros(len(buffer)) for buffer in there]
    homes_of_pong = return_home(second, "kv", [np.ones(r.cu_kv[-1]) for r in second], later)
    homes_of_ping = return_home(first, "kv", [np.ones(r.cu_kv[-1]) for r in first])
    # What pong found for ping's buffer goes home with it.
    handed_on = through_gateways(first, "kv", later)
    homes_of_ping = [own + more for own, more in zip(homes_of_ping, handed_on, strict=True)]
    total: dict[tuple[int, int], float] = {}
    for plan, homes in ((ping, homes_of_ping), (pong, homes_of_pong)):
        for home, rows in zip(homes, home_rows(plan.layout, "kv"), strict=True):
            for gradient, (d, p) in zip(home, rows.tolist(), strict=True):
                total[d, p] = total.get((d, p), 0.0) + gradient
    count = Counter(readers(ping)) + Counter(readers(pong))
    assert {row: readings for row, readings in total.items() if readings} == dict(count)


@given(arbitrary_plans(), links)
def test_what_one_rank_sends_the_other_receives(plan: Plan, links: Links | None) -> None:
    for exchanges in exchanges_of(routes(plan, links)):
        for a, sender in enumerate(exchanges):
            for b, receiver in enumerate(exchanges):
                out, there = sender.send, receiver.receive
                to, came = out.peer == b, there.peer == a
                assert np.array_equal(out.source[to], there.source[came])
                assert np.array_equal(out.destination[to], there.destination[came])
                assert np.array_equal(out.rows[to], there.rows[came])
                assert a != b or not to.any()


@given(arbitrary_plans(), links)
def test_every_rank_knows_where_its_rows_begin_at_a_receiver(plan: Plan, links: Links | None) -> None:
    ranks = plan.layout.ranks
    for exchanges in exchanges_of(routes(plan, links)):
        to_server = np.stack([each.receive.per_peer(ranks) for each in exchanges], axis=1)  # [home, server]
        to_home = np.stack([each.send.per_peer(ranks) for each in exchanges], axis=1)  # [server, home]
        for rank, mine in enumerate(exchanges):
            assert mine.ahead_at_server.dtype == mine.ahead_at_home.dtype == np.int64
            assert mine.ahead_at_server.tolist() == to_server[:rank].sum(axis=0).tolist()
            assert mine.ahead_at_home.tolist() == to_home[:rank].sum(axis=0).tolist()
            assert mine.most_to_server == max(other.receive.total for other in exchanges)
            assert mine.most_to_home == max(other.send.total for other in exchanges)
            assert mine.travelling == to_server.sum() == to_home.sum()


@given(arbitrary_plans(), links)
def test_gradients_add_up_at_home(plan: Plan, links: Links | None) -> None:
    made = routes(plan, links)
    ones = [np.ones(r.q.destination_rows) for r in made]
    assert all((home == 1).all() for home in return_home(made, "q", ones))
    ones = [np.ones(r.cu_kv[-1]) for r in made]
    count = readers(plan)
    for home, rows in zip(return_home(made, "kv", ones), home_rows(plan.layout, "kv"), strict=True):
        assert home.tolist() == [count.get((d, p), 0) for d, p in rows.tolist()]


@settings(max_examples=25)
@given(arbitrary_plans(), links)
def test_key_rows_travel_to_a_server_once_and_over_a_network_to_a_node(plan: Plan, links: Links | None) -> None:
    made, node = routes(plan, links), (links or Links()).nodes(plan.layout.ranks)
    crossed = []
    for rank, part in enumerate(made):
        arrived = [(peer, source + row) for peer, source, _, rows in each(part.kv.receive) for row in range(rows)]
        assert len(arrived) == len(set(arrived))
        handed_on = 0 if part.relay is None else part.relay.receive.total
        there = len(arrived) + part.kv.keep.total + handed_on
        assert part.kv.destination_rows == there, "the buffer has every row once"
        crossed += [(node[rank], *row) for row in arrived if node[row[0]] != node[rank]]
        if part.relay is not None:
            assert part.relay.travelling > 0 and not len(part.relay.keep) + len(part.relay.repeat)
            assert all(node[peer] == node[rank] for peer, *_ in each(part.relay.receive) + each(part.relay.send))
    if links is not None and links.ranks_per_node > 1:
        assert len(crossed) == len(set(crossed))


@given(arbitrary_plans(), st.sampled_from((Links(), Links(1), Links(6))))
def test_with_one_node_or_one_rank_a_node_routes_are_as_if_there_were_no_nodes(plan: Plan, links: Links) -> None:
    made = routes(plan, links)
    assert all(part.relay is None for part in made)
    for one, other in zip(columns_of(made), columns_of(routes(plan)), strict=True):
        assert np.array_equal(one, other)


def test_readers_that_need_a_whole_shard_hand_it_on_by_turns() -> None:
    """Four homes of a document on one node, four readers of all of it on the other."""
    (layout,) = lay_out([800], 8, rank_of=None)
    servers, stops = np.repeat(np.arange(8), 1), np.linspace(100, 800, 8).astype(np.int64)
    plan = Plan(layout, Tasks.sorted(np.zeros(8, np.int64), stops - 100, stops, servers))
    found = Routes(plan, Links(4))
    homes = [sorted(peer for peer, *_ in each(found[rank].kv.receive) if peer < 4) for rank in range(4, 8)]
    assert homes == [[0], [1], [2], [3]]
    # Of their own node's rows each gets its own copy.
    assert [sorted(peer for peer, *_ in each(found[rank].kv.receive) if peer >= 4) for rank in range(4, 8)] == [
        list(range(4, rank)) for rank in range(4, 8)
    ]


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


def columns_of(made: list[Route]) -> list[Any]:
    """Of all routes."""
    return [each for part in made for each in columns(part)]


@given(arbitrary_plans(), links)
def test_the_routes_of_all_ranks_are_those_of_each(plan: Plan, links: Links | None) -> None:
    found = Routes(plan, links)
    assert len(found) == plan.layout.ranks
    for one, other in zip(columns_of(list(found)), columns_of(routes(plan, links)), strict=True):
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
