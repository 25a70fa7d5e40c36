"""Servers without a model that are killed in the middle of a step, and others that come."""

from __future__ import annotations

import pytest

from benchmarks.server_kills import compared, missed
from benchmarks.server_kills_pool import Setup


@pytest.mark.slow
@pytest.mark.matrix  # test_servers.py loses one by schedule; in tests/train/test_servers.py a process dies
def test_losses_loads_and_biases_after_kills_are_those_of_a_run_whose_servers_go_and_come_by_schedule() -> None:
    found = compared(["killed"], Setup(ep=2, servers=2))  # raises where any bit differs
    assert found["killed"]["servers"] == 1 and not missed(found)
