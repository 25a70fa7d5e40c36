"""benchmarks/attention_balance.py at a tiny size, on CPU ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from distca.plan.cost.table_file import write_table

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU rehearsal")


def run(*arguments, folder):
    command = [sys.executable, str(ROOT / "benchmarks" / "attention_balance.py"), *arguments]
    command += ["--ranks", "2", "--seeds", "1", "--tokens", "300", "--output", str(folder / "out.json")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)


def test_tiny_run(tmp_path):
    q = np.array([16.0, 256.0])
    seconds = np.array([[1e-4, 1e-3], [np.nan, 1e-2]])
    shape = {"heads": 2, "kv_heads": 1, "head_dim": 8, "block": 16}
    table = {**shape, "q_rows": q, "kv_rows": q, "forward_seconds": seconds, "backward_seconds": 2 * seconds}
    write_table(tmp_path / "table.json", table)
    options = ("--mixes", "pretrain", "--servers", "3", "2", "--orders", "document", "longest_first", "--halves", "2")
    result = run(*options, "--table", str(tmp_path / "table.json"), "--shape", "2", "1", "8", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    kinds = [(case["servers"], case["half"], case["order"]) for case in report["cases"]]
    assert kinds == [(n, half, order) for n in (3, 2) for half in (0, 1) for order in ("document", "longest_first")]
    for case in report["cases"]:
        for side in ("forward", "backward"):
            assert len(case["predicted"][side]) == len(case["measured"][side]) == len(case["gpu"]) == case["servers"]
            assert min(case["measured"][side]) > 0
    assert sorted({gpu for case in report["cases"] for gpu in case["gpu"]}) == [0, 1]
    found = next(g for g in report["groups"] if (g["servers"], g["order"]) == (3, "document"))
    same = [c for c in report["cases"] if (c["servers"], c["order"]) == (3, "document")]
    for side in ("forward", "backward"):
        off = [np.array(c["predicted"][side]) / c["measured"][side] - 1 for c in same]
        assert found[side]["error_worst"] == pytest.approx(np.abs(off).max(), rel=1e-3)
        slowest = max(max(c["measured"][side]) / np.mean(c["measured"][side]) for c in same)
        assert found[side]["imbalance_measured_worst"] == pytest.approx(slowest, rel=1e-3)
