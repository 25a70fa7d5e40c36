"""Servers without a model that are killed in the middle of a step, and others that come."""

from __future__ import annotations

import pytest

from benchmarks.server_kills import SERVERS, compared


@pytest.mark.slow
def test_losses_after_kills_are_those_of_a_run_whose_servers_go_and_come_by_schedule() -> None:
    found = compared(kills=1)  # raises where a loss differs in any bit
    assert found["kills"] == 1 and found["servers"] == SERVERS
    assert found["join_s"]["most"] < 20
