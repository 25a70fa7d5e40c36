"""The benchmark of recurrent kernels, rehearsed with the reference in place of a GPU's kernel."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import recurrent_kernels


def test_a_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "found.json"
    monkeypatch.setattr(recurrent_kernels, "SEEDS", 1)
    monkeypatch.setattr(sys, "argv", ["-", "--output", str(output), "--kernel", "reference", "--rows", "150"])
    recurrent_kernels.main()
    found = json.loads(output.read_text())["kernels"]["reference"]
    assert found["self_check"] == "right" and found["ms"]["150"]["summary"] > 0
    assert 0 < found["errors"]["one rank"]["dq"] < 0.02
    assert all(
        0.5 < ratio < 1.1 for cut, each in found["errors"].items() if cut != "one rank" for ratio in each.values()
    )
