"""Ticks on GPUs in bfloat16 against megatron-core's own 1F1B, through whole runs with flash kernels over NCCL.

Both sides round to bfloat16 in other orders, so they are compared by losses and gradient norms over a few steps; the
exact comparison, in float32, is that of the CPU tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from distca.testing.ranks import run_ranks
from tests.gpu.runs import train_on_gpus
from tests.train.small_runs import steps_of

pytestmark = pytest.mark.gpu

MODES = {
    "1f1b": {"cad.enabled": "false"},
    "ticks": {},
    "recompute-mlp": {"train.recompute": "mlp"},
    "recompute-all": {"train.recompute": "all"},
}


@pytest.mark.parametrize("ranks,tp,pp", [(2, 1, 2), (4, 1, 4), (4, 1, 2), (4, 2, 2)])
def test_ticks_train_as_1f1b_does(ranks: int, tp: int, pp: int, tmp_path: Path) -> None:
    common = {"output": tmp_path, "parallel.tp": tp, "parallel.pp": pp}
    runs = [{"name": name} | common | mode for name, mode in MODES.items()]
    run_ranks(ranks, train_on_gpus, runs, gpus=True, timeout=280)
    losses, norms = (steps_of(tmp_path / "1f1b", key) for key in ("loss", "grad_norm"))
    assert list(losses) == [1, 2, 3, 4]
    for name in MODES.keys() - {"1f1b"}:
        # bfloat16 keeps 8 bits; the losses are means over 40K tokens, the norms over all gradients.
        assert steps_of(tmp_path / name, "loss") == pytest.approx(losses, rel=5e-4)
        assert steps_of(tmp_path / name, "grad_norm") == pytest.approx(norms, rel=1e-2)
    assert (tmp_path / "ticks" / "phases.json").exists()
