"""``cad.deterministic``: a run that is repeated has the same losses and gradients, to the last bit.

Of each step every parameter's gradient is kept as one sum of its bits, so that
a failure names the first parameter that differs.
With its figures: pytest tests/gpu/test_determinism.py --log-cli-level=INFO
"""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_patches.te.installed import why_not_supported
from tests.gpu.runs import train_on_gpus
from tests.gpu.starts import Case, Starts
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


def cases(folder: Path) -> dict[str, Case]:
    without = why_not_supported()
    return {
        name: Case(2, _repeat, (folder, name, COMMON | settings | {"output": folder}))
        for name, settings in RUNS.items()
        if without is None or "train.fp8" not in settings
    }


def _repeat(folder: Path, name: str, settings: Settings) -> list[list[dict[str, int]]]:
    """By run and step, the sums of this rank's gradients."""
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

    with patch.object(builder, "build_trainer", built), patch.object(OptimizerAndSchedule, "step", noted):
        for number in range(REPEATS):
            found.append([])
            train_on_gpus([settings | {"name": f"{name} {number}"}])
            trainers.clear()
            gc.collect()
    return found


@pytest.mark.parametrize("name", RUNS)
def test_a_repeated_run_is_equal_bit_by_bit(starts: Starts, name: str) -> None:
    if "train.fp8" in RUNS[name] and (reason := why_not_supported()) is not None:
        pytest.skip(reason)
    found, folder = starts.result(name), starts.folder
    for key in ("loss", "grad_norm"):
        values = [list(steps_of(folder / f"{name} {number}", key).values()) for number in range(REPEATS)]
        logger.info("%s, %s: %s", name, key, values)
    assert all(len(run) == COMMON["train.steps"] for rank in found for run in rank)
    differences = [first_difference(rank) for rank in found]
    assert not any(differences), differences
    losses = [steps_of(folder / f"{name} {number}") for number in range(REPEATS)]
    assert all(each == losses[0] for each in losses)
    assert len(set(losses[0].values())) == COMMON["train.steps"]
