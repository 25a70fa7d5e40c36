"""Adam's moments in bfloat16 and main weights as remainders, by Transformer Engine's Adam on two GPUs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_patches.te.installed import why_not_supported
from tests.gpu.runs import train_on_gpus
from tests.gpu.starts import Case, Starts
from tests.train.small_runs import steps_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_not_supported() is not None, reason=str(why_not_supported())),
]

NARROW = {"train.gradients": "bfloat16", "train.moments": "bfloat16"}
RECIPES = ("none", "current")


def _train_and_resume(folder: Path, settings: dict[str, Any]) -> None:
    """A run of four steps; the same from what it saved after two; and from there with float32 moments."""
    common: dict[str, Any] = {
        "output": folder,
        "optimizer.lr": 1e-3,
        "optimizer.min_lr": 1e-4,
        "train.micro_batches": 1,
    }
    common |= {"cad.deterministic": "true", "checkpoint.save_every": 2, "checkpoint.save_at_end": "true"}
    train_on_gpus([common | settings | {"name": "run"}])
    if dist.get_rank() == 0:
        for name in ("resumed", "wider"):
            shutil.copytree(folder / "run", folder / name)
            shutil.rmtree(folder / name / "checkpoints" / "step_000004")
    dist.barrier()
    train_on_gpus([common | settings | {"checkpoint.resume": folder / "resumed"}])
    wide = dict.fromkeys(NARROW, "float32")
    train_on_gpus([common | settings | wide | {"checkpoint.resume": folder / "wider"}])


def cases(folder: Path) -> dict[str, Case]:
    return {fp8: Case(2, _train_and_resume, (folder / fp8, NARROW | {"train.fp8": fp8})) for fp8 in RECIPES}


@pytest.mark.parametrize("fp8", RECIPES)
def test_a_resumed_run_equals_an_uninterrupted_one(fp8: str, starts: Starts) -> None:
    starts.result(fp8)
    for key in ("loss", "grad_norm"):
        run, resumed, wider = (steps_of(starts.folder / fp8 / name, key) for name in ("run", "resumed", "wider"))
        assert resumed == run
        assert len(set(run.values())) == 4
        assert wider[3] == pytest.approx(run[3], rel=1e-2) and wider[4] == pytest.approx(run[4], rel=5e-2)
