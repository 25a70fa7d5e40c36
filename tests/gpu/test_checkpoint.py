"""Checkpoints of GPU runs: the processes that train write them, others read them and go on where the run was."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from distca.testing.ranks import run_ranks
from tests.gpu.runs import train_on_gpus
from tests.train.small_runs import steps_of

pytestmark = pytest.mark.gpu

SETTINGS = {
    "train.micro_batches": 2,
    "checkpoint.save_every": 2,
    "optimizer.lr": 1e-3,
    "optimizer.min_lr": 1e-3,
    "cad.deterministic": "true",
}


@pytest.mark.parametrize("ranks,pp", [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_a_resumed_run_goes_on(ranks: int, pp: int, tmp_path: Path) -> None:
    run: dict[str, Any] = SETTINGS | {"output": tmp_path, "name": "run", "parallel.pp": pp}
    run_ranks(ranks, train_on_gpus, [run], gpus=True, timeout=120)
    losses = steps_of(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step_000004")
    resumed = {key: value for key, value in run.items() if key != "name"} | {"checkpoint.resume": tmp_path / "resumed"}
    run_ranks(ranks, train_on_gpus, [resumed], gpus=True, timeout=120)
    # The order of some additions differs from run to run; a run that began anew would be at another loss.
    assert steps_of(tmp_path / "resumed") == pytest.approx(losses, rel=1e-4)
    assert steps_of(tmp_path / "resumed", "grad_norm") == pytest.approx(
        steps_of(tmp_path / "run", "grad_norm"), rel=1e-2
    )
    assert len(set(losses.values())) == len(losses) == 4
