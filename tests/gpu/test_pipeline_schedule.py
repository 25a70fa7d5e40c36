"""Ticks on GPUs in bfloat16 against megatron-core's own 1F1B, through whole runs with flash kernels over NCCL.

Both sides round to bfloat16 in other orders, so they are compared by losses and gradient norms over a few steps; the
exact comparison, in float32, is that of the CPU tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.runs import train_on_gpus
from tests.gpu.starts import Case, Starts
from tests.train.small_runs import steps_of

pytestmark = pytest.mark.gpu

MODES = {
    "1f1b": {"cad.enabled": "false"},
    "ticks": {},
    "recompute-mlp": {"train.recompute": "mlp"},
    "recompute-all": {"train.recompute": "all"},
}
LAYOUTS = [(2, 1, 2), (4, 1, 4), (4, 1, 2), (4, 2, 2)]
"""Ranks, TP and stages."""


def _runs(folder: Path, tp: int, pp: int) -> list[dict[str, Any]]:
    common = {"output": folder, "parallel.tp": tp, "parallel.pp": pp}
    return [{"name": name} | common | mode for name, mode in MODES.items()]


def cases(folder: Path) -> dict[str, Case]:
    made: dict[str, Case] = {}
    for ranks, tp, pp in LAYOUTS:
        name = f"{ranks}-{tp}-{pp}"
        made[name] = Case(ranks, train_on_gpus, (_runs(folder / name, tp, pp),), world="TP" if tp > 1 else "")
    return made


@pytest.mark.parametrize("ranks,tp,pp", LAYOUTS)
def test_ticks_train_as_1f1b_does(ranks: int, tp: int, pp: int, starts: Starts) -> None:
    starts.result(f"{ranks}-{tp}-{pp}")
    found = starts.folder / f"{ranks}-{tp}-{pp}"
    losses, norms = (steps_of(found / "1f1b", key) for key in ("loss", "grad_norm"))
    assert list(losses) == [1, 2, 3, 4]
    for name in MODES.keys() - {"1f1b"}:
        # bfloat16 keeps 8 bits; the losses are means over 40K tokens, the norms over all gradients.
        assert steps_of(found / name, "loss") == pytest.approx(losses, rel=5e-4)
        assert steps_of(found / name, "grad_norm") == pytest.approx(norms, rel=1e-2)
    assert (found / "ticks" / "phases.json").exists()
