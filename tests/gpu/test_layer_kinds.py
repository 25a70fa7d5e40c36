"""Windows and sinks on GPUs: whole runs of mixed stacks, disaggregated and with attention at home, and over stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from distca.testing.ranks import run_ranks
from tests.gpu.runs import train_on_gpus
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


def _agree(folder: Path, modes: dict[str, dict[str, str]], common: dict[str, object], ranks: int) -> None:
    runs = [{"name": name, "output": folder} | common | mode for name, mode in modes.items()]
    run_ranks(ranks, train_on_gpus, runs, gpus=True, timeout=280)
    losses, norms = (steps_of(folder / "home", key) for key in ("loss", "grad_norm"))
    assert list(losses) == [1, 2, 3, 4]
    for name in modes:
        assert steps_of(folder / name, "loss") == pytest.approx(losses, rel=5e-4)
        assert steps_of(folder / name, "grad_norm") == pytest.approx(norms, rel=1e-2)


@pytest.mark.parametrize("ranks,tp", [(1, 1), (2, 1), (2, 2)])
def test_mixed_stacks_train_as_with_attention_at_home(ranks: int, tp: int, tmp_path: Path) -> None:
    _agree(tmp_path, MODES, MIXED | {"parallel.tp": tp}, ranks)


def test_stages_that_run_other_kinds_at_a_time(tmp_path: Path) -> None:
    mixed = MIXED | {"model.layer_types": "[window, full, full, window]"}
    _agree(tmp_path, {"home": MODES["home"], "ticks": {}}, mixed | {"parallel.pp": 2}, 2)
