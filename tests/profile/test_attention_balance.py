"""benchmarks/attention_balance.py at a tiny size, on CPU ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from distca.profile.tables import write_table

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU rehearsal")


def run(*arguments, folder):
    command = [sys.executable, str(ROOT / "benchmarks" / "attention_balance.py"), *arguments]
    command += [
        "--ranks",
        "2",
        "--seeds",
        "1",
        "--repeats",
        "1",
        "--tokens",
        "300",
        "--output",
        str(folder / "out.json"),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)


def test_tiny_run(tmp_path):
    q = np.array([16.0, 256.0])
    seconds = np.array([[1e-4, 1e-3], [np.nan, 1e-2]])
    shape = {"heads": 2, "kv_heads": 1, "head_dim": 8, "block": 16}
    table = {**shape, "q_rows": q, "kv_rows": q, "forward_seconds": seconds, "backward_seconds": 2 * seconds}
    write_table(tmp_path / "table.json", table)
    mix = ("--mixes", "pretrain", "--table", str(tmp_path / "table.json"))
    result = run(*mix, "--shape", "2", "1", "8", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert [(case["nano_batches"], case["placed"]) for case in report["cases"]] == [
        (1, "at home"),
        (1, "planned"),
        (2, "planned"),
        (2, "planned"),
    ]
    for case in report["cases"]:
        for side in ("forward", "backward"):
            predicted, measured = case["predicted_s"][side], case["measured_s"][side]
            assert len(predicted) == len(measured) == 2
            assert min(measured) > 0
            assert case["imbalance_measured"][side] == pytest.approx(max(measured) / np.mean(measured))
    planned = next(g for g in report["groups"] if g["placed"] == "planned" and g["nano_batches"] == 1)
    case = report["cases"][1]
    off = np.array(case["predicted_s"]["forward"]) / case["measured_s"]["forward"] - 1
    assert planned["forward"]["error_worst"] == pytest.approx(np.abs(off).max())
