"""A process is alive if it is there under its id and from its start, as the kernel counts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from distca.cluster import process
from distca.cluster.process import Process


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield started
    started.kill()
    started.wait()


def _named(pid: int) -> Process:
    found = process._state_and_start(pid)
    assert found is not None
    return replace(Process.here(), pid=pid, started=found[1])


def test_a_process_runs_until_it_is_a_zombie(other: subprocess.Popen[bytes]) -> None:
    named = _named(other.pid)
    assert named.is_running() and Process.here().is_running()
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert not named.is_running()
    other.wait()
    assert not named.is_running()


def test_a_later_process_of_the_same_id_is_another_one(other: subprocess.Popen[bytes]) -> None:
    named = _named(other.pid)
    assert not replace(named, started=named.started - 1).is_running()


def test_the_start_is_what_the_kernel_says_and_moves_with_no_clock(
    other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """psutil adds btime, which follows the clock: after a step of it a healthy rank counted as another process."""
    import psutil

    named = _named(other.pid)
    before = psutil.Process(other.pid).create_time()
    boot = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot + 10)
    monkeypatch.setattr("psutil._pslinux.BOOT_TIME", boot + 10, raising=False)
    assert abs(psutil.Process(other.pid).create_time() - before) > 9, "the stand-in for a clock that was set"
    assert named.is_running()


def test_a_process_of_another_container_or_node_is_never_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    here = replace(Process.here(), pid=2**22 + 1)
    assert not here.is_running()
    assert replace(here, space="pid:[another]").is_running()
    # A node whose first space of ids has the same number.
    monkeypatch.setattr(process, "machine_name", lambda: "another")
    assert here.is_running()
