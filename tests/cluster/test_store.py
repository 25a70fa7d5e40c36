"""Stores for one node listen on its loopback interface only."""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from distca.cluster import store
from distca.cluster.store import InterfaceStore, LoopbackStore, own_store
from distca.errors import LaunchError
from tests.testing.programs import run

ROOT = Path(__file__).parents[2]
LISTENS = """
import os, time, psutil, torch.distributed as dist
dist.init_process_group("gloo")
process = psutil.Process(os.getppid())
found = sorted({each.laddr.ip for each in process.net_connections() if each.status == "LISTEN"})
dist.barrier()
if dist.get_rank() == 0:
    print("torchrun listens on", *found, flush=True)
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
    (tmp_path / "listens.py").write_text(LISTENS)
    started = subprocess.Popen(
        [sys.executable, "-m", "distca.cluster.torchrun", *where, "--nproc-per-node=1", str(tmp_path / "listens.py")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    try:
        assert started.stdout.readline().strip() == "torchrun listens on 127.0.0.1"
        started.send_signal(signal.SIGTERM)
        said = started.communicate(timeout=120)[1]
    finally:
        started.kill()
    assert started.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in said, said


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
