"""Which servers share a machine, and which machine's ranks need most of its memory."""

import logging

import pytest
import torch.distributed as dist

from distca.cluster import topology
from distca.cluster.topology import fullest_node, links_of
from distca.errors import PlanError
from distca.plan import Links
from distca.testing.ranks import run_ranks


@pytest.mark.parametrize(
    "machines,links,said",
    [
        ("a", Links(), None),
        ("aaaa", Links(), None),
        ("abcd", Links(1), "Plans prefer servers on the same machine: 4 machines of 1."),
        ("aabb", Links(2), "Plans prefer servers on the same machine: 2 machines of 2."),
        ("aaabbbccc", Links(3), "Plans prefer servers on the same machine: 3 machines of 3."),
        ("aaab", Links(), "do not know which of the 4 servers share a machine"),
        ("abab", Links(), "do not know which of the 4 servers share a machine"),
        ("aabbaa", Links(), "do not know which of the 6 servers share a machine"),
    ],
)
def test_links_of_machines(machines: str, links: Links, said: str | None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert links_of(list(machines)) == links
    assert said in caplog.text if said else not caplog.messages


def _found(tp: int) -> Links:
    topology.machine_name = lambda: "aabb"[dist.get_rank() // 2]
    return topology.pool_links(tp)


def test_a_server_is_where_its_first_tensor_parallel_rank_is() -> None:
    assert run_ranks(8, _found, 1) == [Links(4)] * 8
    assert run_ranks(8, _found, 2) == [Links(2)] * 8
    assert run_ranks(8, _found, 4) == [Links(1)] * 8


def _chosen(ranks_per_node: int) -> Links | str:
    topology.machine_name = lambda: "a"
    try:
        return topology.pool_links(1, ranks_per_node)
    except PlanError as error:
        return str(error)


def test_a_setting_may_say_who_shares_a_node() -> None:
    assert [run_ranks(2, _chosen, size)[0] for size in (0, 1, 2)] == [Links(), Links(1), Links()]
    assert "`ranks_per_node` is 3, which does not divide the 2 servers" in run_ranks(2, _chosen, 3)[0]


def test_ranks_of_a_machine_need_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [("a", 60, 100), ("b", 30, 200), ("a", 10, 90), ("b", 100, 190)]

    def gather(everyone: list[object], mine: object, group: object) -> None:
        assert mine == ("a", 60, 100) and group is None
        everyone[:] = ranks

    monkeypatch.setattr(topology, "machine_name", lambda: "a")
    monkeypatch.setattr(topology.dist, "get_world_size", lambda group: len(ranks))
    monkeypatch.setattr(topology.dist, "all_gather_object", gather)
    assert fullest_node(60, 100) == (70, 90)
