"""The servers without a model of one machine: their numbers and GPUs."""

from __future__ import annotations

import subprocess
import sys


def test_consecutive_servers_share_a_gpu() -> None:
    words = [sys.executable, "-m", "distca.cluster.server_processes", "4", "3", "6", "2"]
    program = ["bash", "-c", "echo $SERVER $LOCAL_RANK"]
    shown = subprocess.run([*words, *program], capture_output=True, text=True, timeout=60)
    assert (shown.returncode, sorted(shown.stdout.splitlines())) == (0, ["4 6", "5 6", "6 7"])
