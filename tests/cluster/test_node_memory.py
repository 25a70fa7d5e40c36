"""The machine whose ranks need most of what it has."""

from __future__ import annotations

import pytest

from distca.cluster import node_memory
from distca.cluster.node_memory import fullest_node


def test_ranks_of_a_machine_need_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [("a", 60, 100), ("b", 30, 200), ("a", 10, 90), ("b", 100, 190)]

    def gather(everyone: list[object], mine: object, group: object) -> None:
        assert mine == ("a", 60, 100) and group is None
        everyone[:] = ranks

    monkeypatch.setattr(node_memory, "machine_name", lambda: "a")
    monkeypatch.setattr(node_memory.dist, "get_world_size", lambda group: len(ranks))
    monkeypatch.setattr(node_memory.dist, "all_gather_object", gather)
    assert fullest_node(60, 100) == (70, 90)
