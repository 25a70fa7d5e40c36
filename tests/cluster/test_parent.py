"""Ranks end with torchrun, also where it is killed and can end nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testing.programs import run

ROOT = Path(__file__).parents[2]
STAYS = """
import os, time
from distca.cluster.process import end_with_torchrun
end_with_torchrun()
os.write(1, b"up\\n")  # at once, or lines of two ranks mix
time.sleep(240)
"""
JOINS = """
import ctypes, distca
distca.join_world()
told = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(told))  # PR_GET_PDEATHSIG
print("at its parent's end", told.value)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of a parent's end"),
]


@pytest.mark.timeout(250)
def test_ranks_end_with_a_killed_torchrun(tmp_path: Path) -> None:
    (tmp_path / "stays.py").write_text(STAYS)
    words = ["--standalone", "--nproc-per-node=2", str(tmp_path / "stays.py")]
    started = subprocess.Popen(
        [sys.executable, "-m", "distca.cluster.torchrun", *words],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    try:
        assert [started.stdout.readline() for _ in range(2)] == ["up\n"] * 2
    finally:
        started.kill()
    started.communicate(timeout=60)  # until nobody holds the other end of the pipe; ranks would stay for longer


@pytest.mark.parametrize(("variables", "number"), [({"TORCHELASTIC_RUN_ID": "run"}, signal.SIGTERM), ({}, 0)])
def test_joining_the_world_is_enough_and_binds_nobody_to_another_parent(
    tmp_path: Path, variables: dict[str, str], number: int
) -> None:
    (tmp_path / "joins.py").write_text(JOINS)
    done = run(str(tmp_path / "joins.py"), **variables)
    assert f"at its parent's end {int(number)}" in done.stdout, done.stderr
