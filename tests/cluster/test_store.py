"""Stores for one node listen on its loopback interface only."""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from distca.cluster import store
from distca.cluster.store import InterfaceStore, LoopbackStore, own_store
from distca.errors import LaunchError
from tests.testing.programs import Program, run

ROOT = Path(__file__).parents[2]
JOINS = """
import time, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("up", flush=True)
time.sleep(250)
"""


def test_the_store_is_on_loopback_and_works() -> None:
    first = LoopbackStore("unused", 0, 1, True, timedelta(seconds=10))
    assert _listens_on(first) == "127.0.0.1"
    other = LoopbackStore("unused", first.port, 1, False, timedelta(seconds=10))
    other.set("key", "value")
    assert first.get("key") == b"value"


def test_who_has_a_store_of_its_own() -> None:
    timeout = timedelta(seconds=10)
    assert isinstance(own_store(0, 1, "", 0, timeout, {}), LoopbackStore)
    assert own_store(0, 1, "", 0, timeout, {"TORCHELASTIC_USE_AGENT_STORE": "True"}) is None


def _listens_on(made: InterfaceStore) -> str:
    (found,) = {
        each.laddr.ip
        for each in psutil.Process().net_connections()
        if each.status == "LISTEN" and each.laddr.port == made.port
    }
    return str(found)


@pytest.mark.parametrize(
    ("named", "listens"),
    [("10.9.8.7", "10.9.8.7"), ("127.0.1.1", "every"), ("192.0.2.1", "every")],  # its own, as itself, of a router
)
def test_a_store_of_several_nodes_is_on_the_interface_of_its_name(
    named: str, listens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, int]] = []
    create = socket.create_server

    def server(address: tuple[str, int], **others: object) -> socket.socket:
        made.append(address)
        if address[0] == "192.0.2.1":
            raise OSError(errno.EADDRNOTAVAIL, "not here")
        return create(("127.0.0.1", address[1]))

    monkeypatch.setattr(socket, "create_server", server)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 0, 0, "", (named, 0))])
    store._listen("node0", 0).close()
    assert made[-1][0] == ("" if listens == "every" else listens)


def test_a_port_that_is_taken_is_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(LaunchError, match="cannot listen on port"):
        LoopbackStore("", taken.getsockname()[1], 1, True, timedelta(seconds=1))


@pytest.mark.slow
@pytest.mark.timeout(250)
@pytest.mark.parametrize("nodes", ["one", "as of several"])
def test_torchruns_stores_are_where_its_ranks_are_and_a_signal_leaves_no_trace(tmp_path: Path, nodes: str) -> None:
    port = random.randrange(20_000, 30_000)  # below those that the system hands out, to others too
    where = ["--standalone"]
    if nodes != "one":
        where = ["--nnodes=1", "--node-rank=0", "--master-addr=127.0.0.1", f"--master-port={port}"]
    (tmp_path / "joins.py").write_text(JOINS)
    words = ["-m", "distca.cluster.torchrun", *where, "--nproc-per-node=1", str(tmp_path / "joins.py")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    start = subprocess.Popen if nodes == "one" else Program  # how Python ends after a signal is seen once
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("w") as to_out, err.open("w") as to_err:
        started = start([sys.executable, *words], env=environment, stdout=to_out, stderr=to_err)
    try:
        until = time.monotonic() + 120
        while out.read_text() != "up\n":
            assert started.poll() is None and time.monotonic() < until, err.read_text()
            time.sleep(0.1)
        connections = psutil.Process(started.pid).net_connections()
        assert {each.laddr.ip for each in connections if each.status == "LISTEN"} == {"127.0.0.1"}
        started.send_signal(signal.SIGTERM)
        assert started.wait(timeout=120) == 128 + signal.SIGTERM
    finally:
        started.kill()
    assert "Traceback" not in err.read_text()


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_a_rank_that_cannot_end_is_killed_soon_after_another_has_failed(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "time.sleep(200) if os.environ['RANK'] == '0' else sys.exit(1)\n"
    )
    words = ["--standalone", "--nproc-per-node=2", str(tmp_path / "hangs.py")]
    done = run("-m", "distca.cluster.torchrun", *words, timeout=150)  # far less than the rank would take
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and "exitcode  : 1" in done.stderr
