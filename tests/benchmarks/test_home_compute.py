"""The benchmark of the compute at home runs and writes what it says, at a tiny size."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SIZES = {
    "loss-rows": 50,
    "rows": 16,
    "repeats": 1,
    "hidden": 32,
    "ffn": 48,
    "heads": 4,
    "kv-heads": 2,
    "vocabulary": 96,
}


def test_every_part_is_timed_beside_its_products(tmp_path):
    output = tmp_path / "results" / "home_compute.json"
    sizes = [text for name, value in SIZES.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "benchmarks.home_compute", "--output", str(output), *sizes]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "share of products" in done.stderr
    report = json.loads(output.read_text())
    assert {"command", "hardware", "versions", "shape", "rows"} <= report.keys()
    parts = {each["part"]: each for each in report["figures"]}
    for name in ("pre", "post", "post+pre"):
        assert {f"{name}, forward", f"{name}, backward"} <= parts.keys()
    for each in parts.values():
        assert each["ms"] > 0 and each["products_ms"] > 0
        assert abs(each["share_of_products"] - each["products_ms"] / each["ms"]) < 1e-9
