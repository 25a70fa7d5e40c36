"""Checkpoints of GPU runs: the processes that train write them, others read them and go on where the run was."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.gpu.runs import train_on_gpus
from tests.gpu.starts import Starts
from tests.train.small_runs import steps_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

SETTINGS = {
    "train.micro_batches": 2,
    "checkpoint.save_every": 2,
    "optimizer.lr": 1e-3,
    "optimizer.min_lr": 1e-3,
    "cad.deterministic": "true",
}


LAYOUTS = {1: [1], 2: [1, 2], 4: [2]}
"""Stages, by ranks; each line is two starts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all runs."""
    return tmp_path_factory.mktemp("checkpoints")


def _settings(folder: Path, pp: int) -> dict[str, Any]:
    return SETTINGS | {"output": folder, "parallel.pp": pp}


def _train(folder: Path, pp: int) -> None:
    train_on_gpus([_settings(folder, pp) | {"name": "run"}])


def _resume(folder: Path, pp: int) -> None:
    """Go on from the run's state after two steps."""
    if dist.get_rank() == 0:
        shutil.copytree(folder / "run", folder / "resumed")
        shutil.rmtree(folder / "resumed" / "checkpoints" / "step_000004")
    dist.barrier()
    train_on_gpus([_settings(folder, pp) | {"checkpoint.resume": folder / "resumed"}])


@pytest.mark.parametrize("ranks,pp", [(ranks, pp) for ranks, stages in LAYOUTS.items() for pp in stages])
def test_a_resumed_run_goes_on(ranks: int, pp: int, folder: Path, starts: Starts) -> None:
    names = {stages: f"{ranks}-{stages}" for stages in LAYOUTS[ranks]}
    for what in (_train, _resume):
        cases = {name: (what, folder / name, stages) for stages, name in names.items()}
        starts.result(f"{what.__name__} on {ranks} ranks", names[pp], ranks, cases)
    run, resumed = (folder / names[pp] / name for name in ("run", "resumed"))
    losses = steps_of(run)
    # The order of some additions differs from run to run; a run that began anew would be at another loss.
    assert steps_of(resumed) == pytest.approx(losses, rel=1e-4)
    assert steps_of(resumed, "grad_norm") == pytest.approx(steps_of(run, "grad_norm"), rel=1e-2)
    assert len(set(losses.values())) == len(losses) == 4
