"""Windows and sinks on GPUs: whole runs of mixed stacks, disaggregated and with attention at home, and over stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.runs import train_on_gpus
from tests.gpu.starts import Starts
from tests.train.small_runs import steps_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all runs."""
    return tmp_path_factory.mktemp("kinds")


def _runs(folder: Path, own: dict[str, Any], modes: dict[str, dict[str, str]]) -> list[dict[str, Any]]:
    return [{"name": name, "output": folder} | own | mode for name, mode in modes.items()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mixed_stacks_train_as_with_attention_at_home(layout: str, folder: Path, starts: Starts) -> None:
    ranks, _, modes = LAYOUTS[layout]
    together = {name: given for name, given in LAYOUTS.items() if given[0] == ranks}
    cases = {name: (train_on_gpus, _runs(folder / name, *given[1:])) for name, given in together.items()}
    starts.result(f"{ranks} ranks", layout, ranks, cases)
    losses, norms = (steps_of(folder / layout / "home", key) for key in ("loss", "grad_norm"))
    assert list(losses) == [1, 2, 3, 4]
    for name in modes:
        assert steps_of(folder / layout / name, "loss") == pytest.approx(losses, rel=5e-4)
        assert steps_of(folder / layout / name, "grad_norm") == pytest.approx(norms, rel=1e-2)
