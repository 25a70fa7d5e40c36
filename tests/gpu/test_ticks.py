"""Ticks on GPUs in bfloat16 against megatron-core's own 1F1B, through whole runs with flash kernels over NCCL.

Both sides round to bfloat16 in other orders, so they are compared by losses and gradient norms over a few steps; the
exact comparison, in float32, is that of the CPU tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distca.testing.ranks import run_ranks
from tests.train.small_runs import steps_of

pytestmark = pytest.mark.gpu

SETTINGS = {
    "model.layers": 4,
    "model.hidden": 1024,
    "model.ffn": 2048,
    "model.heads": 8,
    "model.kv_heads": 2,
    "data.source": "mix",
    "data.path": "prolong-long",
    "data.vocabulary": 4096,
    "data.context_length": 8192,
    "data.tokens_per_rank": 8192,
    "data.whole_documents": "true",
    "data.validation_fraction": 0,
    # Small steps, so that weights stay the same up to rounding and what each step computes can be compared.
    "optimizer.lr": 1e-5,
    "optimizer.min_lr": 1e-5,
    "optimizer.warmup_steps": 0,
    "train.steps": 4,
    "train.precision": "bf16",
    "train.micro_batches": 5,
    "checkpoint.save_at_end": "false",
    "log.tensorboard": "false",
}
MODES = {
    "1f1b": {"cad.enabled": "false"},
    "ticks": {},
    "recompute-mlp": {"train.recompute": "mlp"},
    "recompute-all": {"train.recompute": "all"},
}


def _train(output: str, tp: int, pp: int) -> None:
    """Both schedules on the ranks that call it."""
    from distca.train.config import parse_run_config
    from distca.train.corpus import open_corpus
    from distca.train.main import run_on
    from distca.train.world import World

    world = World(
        torch.distributed.get_rank(),
        torch.distributed.get_world_size(),
        torch.device("cuda", torch.cuda.current_device()),
    )
    for name, mode in MODES.items():
        chosen: dict[str, Any] = (
            SETTINGS | mode | {"name": name, "output": output, "parallel.tp": tp, "parallel.pp": pp}
        )
        config = parse_run_config([word for key, value in chosen.items() for word in (f"--{key}", str(value))])
        run_on(world, config, open_corpus(config))


@pytest.mark.parametrize("ranks,tp,pp", [(2, 1, 2), (4, 1, 4), (4, 1, 2), (4, 2, 2)])
def test_ticks_train_as_1f1b_does(ranks: int, tp: int, pp: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    run_ranks(ranks, _train, str(tmp_path), tp, pp, gpus=True, timeout=280)
    reference = {key: steps_of(tmp_path / "1f1b", key) for key in ("loss", "grad_norm")}
    assert list(reference["loss"]) == [1, 2, 3, 4]
    for name in ("ticks", "recompute-mlp", "recompute-all"):
        # bfloat16 keeps 8 bits; the losses are means over 40K tokens, the norms over all gradients.
        assert steps_of(tmp_path / name, "loss") == pytest.approx(reference["loss"], rel=5e-4)
        assert steps_of(tmp_path / name, "grad_norm") == pytest.approx(reference["grad_norm"], rel=1e-2)
    assert (tmp_path / "ticks" / "phases.json").exists()
