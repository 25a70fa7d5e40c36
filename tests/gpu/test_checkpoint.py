"""Checkpoints of GPU runs: the processes that train write them, others read them and go on where the run was."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.gpu.runs import train_on_gpus
from tests.gpu.starts import Case, Starts
from tests.train.small_runs import steps_of

pytestmark = pytest.mark.gpu

SETTINGS = {
    "train.micro_batches": 2,
    "checkpoint.save_every": 2,
    "optimizer.lr": 1e-3,
    "optimizer.min_lr": 1e-3,
    "cad.deterministic": "true",
}
LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 2)]
"""Ranks and stages."""


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


def cases(folder: Path) -> dict[str, Case]:
    """Other processes resume than those that trained."""
    made: dict[str, Case] = {}
    for ranks, pp in LAYOUTS:
        name = f"{ranks}-{pp}"
        made[f"train {name}"] = Case(ranks, _train, (folder / name, pp))
        made[name] = Case(ranks, _resume, (folder / name, pp), world="resumed", needs=(f"train {name}",))
    return made


@pytest.mark.parametrize("ranks,pp", LAYOUTS)
def test_a_resumed_run_goes_on(ranks: int, pp: int, starts: Starts) -> None:
    for name in (f"train {ranks}-{pp}", f"{ranks}-{pp}"):
        starts.result(name)
    run, resumed = (starts.folder / f"{ranks}-{pp}" / name for name in ("run", "resumed"))
    losses = steps_of(run)
    # The order of some additions differs from run to run; a run that began anew would be at another loss.
    assert steps_of(resumed) == pytest.approx(losses, rel=1e-4)
    assert steps_of(resumed, "grad_norm") == pytest.approx(steps_of(run, "grad_norm"), rel=1e-2)
    assert len(set(losses.values())) == len(losses) == 4
