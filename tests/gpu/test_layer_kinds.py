"""Windows and sinks on GPUs: whole runs of mixed stacks, disaggregated and with attention at home, and over stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.runs import train_on_gpus
from tests.gpu.starts import Case, Starts
from tests.train.small_runs import steps_of

pytestmark = pytest.mark.gpu

MIXED = {"model.layer_types": "[window, full]", "model.window": "1000", "model.sinks": "true"}
MODES = {
    "home": {"cad.enabled": "false"},
    "keep": {},
    "nccl": {"cad.transport": "nccl"},
    "resend": {"cad.backward": "resend"},
    "recompute": {"train.recompute": "all"},
    "offload": {"train.recompute": "all", "train.offload": "all"},
}


STAGES = {"home": MODES["home"], "ticks": {}}
STAGE_KINDS = MIXED | {"model.layer_types": "[window, full, full, window]", "parallel.pp": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, dict[str, str]]]] = {
    "alone": (1, MIXED, MODES),
    "two": (2, MIXED, MODES),
    "tp": (2, MIXED | {"parallel.tp": 2}, MODES),
    "stages that run other kinds at a time": (2, STAGE_KINDS, STAGES),
}
"""Ranks, settings, and modes, of which each is a run."""


def _runs(folder: Path, own: dict[str, Any], modes: dict[str, dict[str, str]]) -> list[dict[str, Any]]:
    return [{"name": name, "output": folder} | own | mode for name, mode in modes.items()]


def cases(folder: Path) -> dict[str, Case]:
    return {
        name: Case(ranks, train_on_gpus, (_runs(folder / name, own, modes),))
        for name, (ranks, own, modes) in LAYOUTS.items()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mixed_stacks_train_as_with_attention_at_home(layout: str, starts: Starts) -> None:
    starts.result(layout)
    folder, modes = starts.folder, LAYOUTS[layout][2]
    losses, norms = (steps_of(folder / layout / "home", key) for key in ("loss", "grad_norm"))
    assert list(losses) == [1, 2, 3, 4]
    for name in modes:
        assert steps_of(folder / layout / name, "loss") == pytest.approx(losses, rel=5e-4)
        assert steps_of(folder / layout / name, "grad_norm") == pytest.approx(norms, rel=1e-2)
