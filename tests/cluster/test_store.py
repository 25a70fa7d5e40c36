"""Stores for one node listen on its loopback interface only."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from distca.cluster.store import LoopbackStore, own_store_of_one_node

ROOT = Path(__file__).parents[2]
TORCHRUN = (sys.executable, "-m", "distca.cluster.torchrun", "--standalone")
LISTENS = """
import os, psutil, torch.distributed as dist
dist.init_process_group("gloo")
process = psutil.Process(os.getppid())
found = sorted({each.laddr.ip for each in process.net_connections() if each.status == "LISTEN"})
dist.barrier()
if dist.get_rank() == 0:
    print("torchrun listens on", *found, flush=True)
dist.destroy_process_group()
"""


def test_the_store_is_on_loopback_and_works() -> None:
    store = LoopbackStore("unused", 0, 1, True, timedelta(seconds=10))
    (listening,) = {
        each.laddr
        for each in psutil.Process().net_connections()
        if each.status == "LISTEN" and each.laddr.port == store.port
    }
    assert listening.ip == "127.0.0.1"
    other = LoopbackStore("unused", store.port, 1, False, timedelta(seconds=10))
    other.set("key", "value")
    assert store.get("key") == b"value"


def test_ranks_of_several_nodes_or_of_torchrun_have_another_one() -> None:
    timeout = timedelta(seconds=10)
    assert own_store_of_one_node(0, 1, 0, timeout, {}) is not None
    assert own_store_of_one_node(0, 1, 0, timeout, {"TORCHELASTIC_USE_AGENT_STORE": "True"}) is None
    assert own_store_of_one_node(0, 4, 29500, timeout, {"LOCAL_WORLD_SIZE": "2"}) is None


@pytest.mark.slow
def test_torchruns_stores_are_on_loopback(tmp_path: Path) -> None:
    (tmp_path / "listens.py").write_text(LISTENS)
    done = subprocess.run(
        [*TORCHRUN, "--nproc-per-node=2", str(tmp_path / "listens.py")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "torchrun listens on 127.0.0.1"
