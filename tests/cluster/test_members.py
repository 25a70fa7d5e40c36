"""Homes and servers without a model, as members of a run."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from distca.cluster.interface import LOOPBACK
from distca.cluster.members import Members
from distca.cluster.pool_store import PoolStore
from distca.cluster.process import Member


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
