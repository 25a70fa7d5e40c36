"""``distca doctor`` on a machine with GPUs."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.train.small_runs import ROOT


def test_it_names_the_driver_and_the_links() -> None:
    command = [sys.executable, "-c", "from distca.commands.main import main; main()", "doctor"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"driver\W+\d+\.\d+.*up to CUDA \d+\.\d", done.stdout), done.stdout
    assert "NVLink" in done.stdout
