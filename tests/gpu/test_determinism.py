"""``cad.deterministic``: a run that is repeated has the same losses and gradients, to the last bit.

All runs are in one world of two ranks. Of each step every parameter's gradient is kept as one sum of its bits, so that
a failure names the first parameter that differs.
With its figures: pytest tests/gpu/test_determinism.py --log-cli-level=INFO
"""

from __future__ import annotations

import gc
import json
import logging
import traceback
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from distca.testing.ranks import RankFailure, run_ranks
from megatron_patches.te.installed import why_not_supported
from tests.gpu.runs import train_on_gpus
from tests.train.small_runs import steps_of

pytestmark = pytest.mark.gpu

logger = logging.getLogger(__name__)
Settings = dict[str, Any]

COMMON: Settings = {
    "cad.deterministic": "true",
    "optimizer.lr": 1e-4,
    "optimizer.min_lr": 1e-4,
    "train.micro_batches": 2,
    "train.recompute": "none",
    "train.steps": 3,
}
RUNS: dict[str, Settings] = {
    "data": {},
    "data over NCCL": {"cad.transport": "nccl"},
    "tensor": {"parallel.tp": 2},
    "stages": {"parallel.pp": 2},
    "data in FP8": {"train.fp8": "blockwise"},
    "tensor in FP8": {"train.fp8": "current", "parallel.tp": 2},
    "stages in FP8": {"train.fp8": "delayed", "parallel.pp": 2},
}
REPEATS = 4


def sums_of_gradients(model: Any) -> dict[str, int]:
    """By parameter, the sum of its gradient's bits, as 32-bit integers; gradients are float32."""
    named = [(name, weight.main_grad) for name, weight in model.named_parameters()]
    sums = torch.stack([gradient.view(torch.int32).sum(dtype=torch.int64) for _, gradient in named]).tolist()
    return dict(zip([name for name, _ in named], sums, strict=True))


def first_difference(runs: list[list[dict[str, int]]]) -> str:
    """Where a repeated run first differs from the first one; "" if nowhere. ``runs`` has sums for every step."""
    for number, run in enumerate(runs[1:], 2):
        assert len(run) == len(runs[0])
        for step, (first, again) in enumerate(zip(runs[0], run, strict=True), 1):
            names = [name for name in first if first[name] != again[name]]
            if names:
                # Backward reaches the last parameters first.
                return f"run {number}, step {step}: {', '.join(reversed(names))}"
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all runs; each rank writes the sums of its gradients into NAME/RANK.json."""
    made = tmp_path_factory.mktemp("determinism")
    try:
        run_ranks(2, _all, made, gpus=True, timeout=280)
    except RankFailure as failure:
        (made / "failure.txt").write_text(str(failure))
    return made


def _all(folder: Path) -> None:
    without = why_not_supported()
    for name, settings in RUNS.items():
        if without is None or "train.fp8" not in settings:
            _repeat(folder, name, COMMON | settings | {"output": folder})


def _repeat(folder: Path, name: str, settings: Settings) -> None:
    from distca.train.run import builder
    from megatron_patches.training.optimizer import OptimizerAndSchedule

    build_trainer, step = builder.build_trainer, OptimizerAndSchedule.step
    trainers: list[Any] = []
    found: list[list[dict[str, int]]] = []

    def built(*arguments: Any) -> Any:
        trainers[:] = [build_trainer(*arguments)]
        return trainers[0]

    def noted(optimizer: OptimizerAndSchedule) -> tuple[float, float]:
        found[-1].append(sums_of_gradients(trainers[0].model))
        return step(optimizer)

    report: dict[str, Any] = {"error": "", "runs": found}
    with patch.object(builder, "build_trainer", built), patch.object(OptimizerAndSchedule, "step", noted):
        try:
            for number in range(REPEATS):
                found.append([])
                train_on_gpus([settings | {"name": f"{name} {number}"}])
                trainers.clear()
                gc.collect()
        except Exception:
            report["error"] = traceback.format_exc()
    (folder / name).mkdir(exist_ok=True)
    (folder / name / f"{dist.get_rank()}.json").write_text(json.dumps(report))


@pytest.mark.parametrize("name", RUNS)
def test_a_repeated_run_is_equal_bit_by_bit(folder: Path, name: str) -> None:
    if "train.fp8" in RUNS[name] and (reason := why_not_supported()) is not None:
        pytest.skip(reason)
    reports = sorted((folder / name).glob("*.json"))
    failure = folder / "failure.txt"
    assert len(reports) == 2, failure.read_text()[-3000:] if failure.exists() else "nothing was said"
    found = [json.loads(file.read_text()) for file in reports]
    assert not any(rank["error"] for rank in found), "\n".join(rank["error"] for rank in found)
    for key in ("loss", "grad_norm"):
        values = [list(steps_of(folder / f"{name} {number}", key).values()) for number in range(REPEATS)]
        logger.info("%s, %s: %s", name, key, values)
    assert all(len(run) == COMMON["train.steps"] for rank in found for run in rank["runs"])
    differences = [first_difference(rank["runs"]) for rank in found]
    assert not any(differences), differences
    losses = [steps_of(folder / f"{name} {number}") for number in range(REPEATS)]
    assert all(each == losses[0] for each in losses)
    assert len(set(losses[0].values())) == COMMON["train.steps"]


def test_ranks_come_to_their_end(folder: Path) -> None:
    """Also when all runs are done."""
    failure = folder / "failure.txt"
    assert not failure.exists(), failure.read_text()[-3000:]
