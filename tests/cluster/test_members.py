"""Homes and servers without a model, as members of a run."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from distca.cluster.interface import LOOPBACK
from distca.cluster.members import Members
from distca.cluster.pool_store import PoolStore
from distca.cluster.process import Member, Process


def test_a_server_hears_of_the_end_while_its_connection_to_the_store_waits() -> None:
    homes = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    server = dist.TCPStore(LOOPBACK, homes.port, is_master=False, timeout=timedelta(seconds=2))
    members = Members(PoolStore(server, "run"), [Member.here()] * 2, own=1, homes=1)

    def wait() -> None:
        with suppress(dist.DistError):
            server.get("never")

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.1)
    PoolStore(homes, "run").put("over", True)
    began = time.monotonic()
    assert members.is_over()
    assert time.monotonic() - began < 1
    assert PoolStore(homes, "run").has("left/0")
    waiting.join()


def test_homes_wait_at_the_end_for_servers_that_came_later() -> None:
    homes = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    meeting = PoolStore(homes, "run")
    home, first = (Member("there", replace(Process.here(), pid=2**22 + number)) for number in (1, 2))
    meeting.put("members", (1, [home, first]))
    later = [Members.of_server(dist.TCPStore(LOOPBACK, homes.port, is_master=False), 0) for _ in range(2)]
    of_home = Members(meeting, [home, first], own=0, homes=1)
    for late in later:  # reports name no server 1, which never was
        assert (late.name(late.own), of_home.name(late.own)) == ("Server 0", "A server that came later")
    assert of_home.name(1) == later[0].name(1) == "Server 0"
    ends = threading.Thread(target=of_home.let_servers_go)
    ends.start()
    for server in later:
        ends.join(0.2)
        assert ends.is_alive()
        while not server.is_over():
            time.sleep(0.01)
    ends.join(5)
    assert not ends.is_alive()
