"""Training with pipeline stages through the real loop: same losses as megatron-core's 1F1B on the same batches."""

import json
from pathlib import Path

from distca.testing.ranks import run_ranks
from distca.train.settings import (
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


def _config(output: str, name: str, cad: CadConfig, steps: int = 3, resume: str | None = None) -> RunConfig:
    return RunConfig(
        name=name,
        output=output,
        model=ModelConfig(layers=2, hidden=32, ffn=48, heads=2, kv_heads=1),
        parallel=ParallelConfig(pp=2),
        cad=cad,
        data=DataConfig(context_length=128, longer="split", tokens_per_rank=128, whole_documents=True),
        optimizer=OptimizerConfig(warmup_steps=1, min_lr=3e-3),  # constant, whatever the number of steps
        train=TrainConfig(steps=steps, micro_batches=3, validate_batches=1),
        checkpoint=CheckpointConfig(save_at_end=name == "resumed", resume=resume),
        log=LogConfig(tensorboard=False),
    )


def _train(output: str) -> None:
    from distca.train.corpus import open_corpus
    from distca.train.main import run_on
    from distca.train.world import World
    from megatron_patches.cpu import use_cpu

    use_cpu()
    import torch
    import torch.distributed as dist

    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    for name, cad in (
        ("ticks", CadConfig()),
        ("one-half", CadConfig(ping_pong=False)),
        ("1f1b", CadConfig(enabled=False)),
    ):
        config = _config(output, name, cad)
        run_on(world, config, open_corpus(config))
    for steps, resume in ((2, None), (3, "latest")):
        config = _config(output, "resumed", CadConfig(), steps, resume)
        run_on(world, config, open_corpus(config))


def test_ticks_train_as_1f1b_does(tmp_path: Path) -> None:
    run_ranks(4, _train, str(tmp_path), timeout=200)
    lines = {
        name: [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("ticks", "one-half", "1f1b", "resumed")
    }
    for name in ("ticks", "one-half"):
        for ours, theirs in zip(lines[name], lines["1f1b"], strict=True):
            assert abs(ours["loss"] - theirs["loss"]) <= 1e-5 * theirs["loss"]
            assert abs(ours["grad_norm"] - theirs["grad_norm"]) <= 1e-4 * theirs["grad_norm"]
        assert abs(lines[name][-1]["validation_loss"] - lines["1f1b"][-1]["validation_loss"]) <= 1e-4
    assert [line["loss"] for line in lines["resumed"]] == [line["loss"] for line in lines["ticks"]]
    # Idle stages serve: planned attention is level over all ranks and phases, warm-up and drain included.
    for line in lines["ticks"]:
        assert line["imbalance_after"] < 1.1 < line["imbalance_before"]
