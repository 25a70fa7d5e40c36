"""The servers without a model of one machine: their numbers and GPUs, and the end of one that its homes wait for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from distca.cluster import server_processes
from distca.cluster.environment import ServerPlace
from distca.cluster.interface import LOOPBACK
from distca.cluster.members import Members
from distca.cluster.pool_store import PoolStore
from distca.cluster.process import Member
from distca.errors import LaunchError
from distca.testing.ranks import run_ranks
from distca.train.launch.machines import free_port
from distca.train.run import serve


def test_consecutive_servers_share_a_gpu() -> None:
    words = [sys.executable, "-m", "distca.cluster.server_processes", "4", "3", "6", "2"]
    program = ["bash", "-c", "echo $SERVER $LOCAL_RANK"]
    shown = subprocess.run([*words, *program], capture_output=True, text=True, timeout=60)
    assert (shown.returncode, sorted(shown.stdout.splitlines())) == (0, ["4 6", "5 6", "6 7"])


def test_a_server_that_is_started_by_hand_finds_homes_of_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POOL_NODES", raising=False)
    with socket.create_server(("127.0.0.2", 0)) as homes:
        place = ServerPlace(0, 0, *homes.getsockname())
        assert serve._address(place) == place.address
        monkeypatch.setenv("POOL_NODES", "1")
        assert serve._address(place) == LOOPBACK
    monkeypatch.delenv("POOL_NODES")
    assert serve._address(place) == LOOPBACK
    monkeypatch.setattr(serve, "TIMEOUT", timedelta(seconds=0.1))
    with pytest.raises(LaunchError, match=f"No homes answered at port {place.port} .* of 127.0.0.1 in 0 s"):
        serve._store(place)


def _lose_early_and_late() -> tuple[str, bool]:
    """What homes of two servers say when server 1 is killed before it has met them; and whether they are told of
    server 2, which is killed later."""
    dist.destroy_process_group()
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.port)}
    PoolStore(store, "run").put("server/0", Member.here())
    with ThreadPoolExecutor(1) as thread:
        homes = thread.submit(Members.of_homes, 2)
        assert server_processes.run(1, 1, 0, 1, ["bash", "-c", "kill -9 $$"]) == 0
        refused = homes.exception(20)
    assert server_processes.run(2, 1, 0, 1, ["bash", "-c", "touch $SERVER_MET; kill -9 $$"]) == 0
    assert isinstance(refused, LaunchError)
    return str(refused), PoolStore(store, "run").has("ended/2")


def test_homes_are_told_of_a_server_that_is_killed_before_it_has_met_them() -> None:
    said = f"Server 1 on {socket.gethostname()} was killed by SIGKILL before it met the homes."
    assert run_ranks(1, _lose_early_and_late) == [(said, False)]


def test_sigterm_ends_a_launcher_that_waits_for_homes_to_report_a_server_to() -> None:
    words = [sys.executable, "-m", "distca.cluster.server_processes", "0", "1", "0", "1"]
    program = ["bash", "-c", "(sleep 0.5; kill $PPID) & exit 3"]
    homes = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port())}
    shown = subprocess.run([*words, *program], env=os.environ | homes, capture_output=True, text=True, timeout=15)
    assert (shown.returncode, shown.stderr) == (3, "")
