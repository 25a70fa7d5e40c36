"""Training with pipeline stages through the real loop: same losses as megatron-core's 1F1B on the same batches."""

import json
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from benchmarks.pipeline import idle_shares
from distca.testing.ranks import run_ranks
from distca.train.config.schema import (
    CadConfig,
    CheckpointConfig,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from tests.train.small_runs import open_small_corpus

pytestmark = pytest.mark.slow

MODEL = ModelConfig(layers=4, hidden=64, ffn=48, heads=2, kv_heads=1)
"""It has heads for which the cost table of CPUs holds, and two layers on a stage."""


def _config(output: str, name: str, cad: CadConfig) -> RunConfig:
    return RunConfig(
        name=name,
        output=output,
        model=MODEL,
        parallel=ParallelConfig(pp=2),
        cad=cad,
        data=DataConfig(source="mix", path="prolong", context_length=128, tokens_per_rank=128, whole_documents=True),
        optimizer=OptimizerConfig(warmup_steps=1, min_lr=3e-3),  # constant, whatever the number of steps
        train=TrainConfig(steps=2, micro_batches=3, validate_batches=1),
        checkpoint=CheckpointConfig(save_at_end=False),
        log=LogConfig(tensorboard=False, timeline_steps=(2, 9)),
    )


def _train(output: str) -> None:
    from distca.train.run.main import run_on
    from megatron_patches.patches.cpu import use_cpu
    from megatron_patches.ranks.world import World

    use_cpu()
    import torch
    import torch.distributed as dist

    import distca

    world, made = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu")), distca.CAD
    level = CadConfig(tolerance=0.05)  # so few tokens can hardly be more level, and trying takes long
    for name, cad, measured_by in (
        ("ticks", level, "auto"),
        ("1f1b", CadConfig(enabled=False), "auto"),
        ("measured-time", level, "time"),  # as runs on GPUs take by themselves
    ):
        distca.CAD = partial(made, level=measured_by)
        config = _config(output, name, cad)
        with patch("distca.train.run.loop.plot_balance"):
            run_on(world, config, open_small_corpus(config))


def test_ticks_train_as_1f1b_does(tmp_path: Path) -> None:
    run_ranks(4, _train, str(tmp_path), timeout=200)
    lines = {
        path.parent.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in tmp_path.glob("*/metrics.jsonl")
    }
    for name in ("ticks", "measured-time"):
        for ours, theirs in zip(lines[name], lines["1f1b"], strict=True):
            assert abs(ours["loss"] - theirs["loss"]) <= 1e-5 * theirs["loss"]
            assert abs(ours["grad_norm"] - theirs["grad_norm"]) <= 1e-4 * theirs["grad_norm"]
        assert abs(lines[name][-1]["validation_loss"] - lines["1f1b"][-1]["validation_loss"]) <= 1e-4
    for line in lines["measured-time"]:
        assert line["imbalance_after"] < line["imbalance_before"]
    for name, most in (("ticks", 1.1), ("1f1b", 10.0)):
        phases = json.loads((tmp_path / name / "phases.json").read_text())
        measured = phases["measured"]
        assert len(measured["seconds"]) == 2 * 4 and phases["steps"] == 1
        assert all(len(row) == 4 for row in measured["seconds"]), "a column per rank of the pool"
        assert (tmp_path / name / "phases.png").exists()
        idle = idle_shares(json.loads((tmp_path / name / "timeline.json").read_text())["traceEvents"])
        assert list(idle) == [0, 1, 2, 3] and all(0 < share < 1 for share in idle.values())
        assert phases.get("planned", measured)["phases"] < most
    # At home stage 0 has nothing to do in the last forward phase; on the pool it serves there.
    last_forward = {
        name: json.loads((tmp_path / name / "phases.json").read_text())["measured"]["seconds"][3]
        for name in ("ticks", "1f1b")
    }
    assert last_forward["1f1b"][:2] == [0, 0] and min(last_forward["ticks"]) > 0
    timed = json.loads((tmp_path / "measured-time" / "phases.json").read_text())
    first, second = np.array(timed["other"]["seconds"][0]).reshape(2, 2)
    assert min(first) > 0 == max(second) and "with_linear" not in measured
    attention = np.array(timed["planned"]["seconds"][0]).reshape(2, 2)
    assert attention[1].sum() > attention[0].sum(), "the idle stage takes more"
    # Idle stages serve: planned attention is level over all ranks and phases, warm-up and drain included.
    for line in lines["ticks"]:
        assert line["imbalance_after"] < 1.1 < line["imbalance_before"]
