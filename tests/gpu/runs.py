"""Whole runs of a small model on GPUs, for tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from distca.versions import header, write_report

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


def settings_line(own: dict[str, Any]) -> list[str]:
    """A command line of the small settings, with some of one's own."""
    return [word for name, value in (SETTINGS | own).items() for word in (f"--{name}", str(value))]


def train_on_gpus(runs: list[dict[str, Any]]) -> None:
    """Train one run after the other on the ranks that call this, each with its own settings beside the small ones, and
    draw nothing, which takes longer than some runs."""
    from distca.train.config.cli import parse_run_config
    from distca.train.data.corpus import open_corpus
    from distca.train.run.main import run_on
    from megatron_patches.ranks.world import World

    world = World(
        torch.distributed.get_rank(),
        torch.distributed.get_world_size(),
        torch.device("cuda", torch.cuda.current_device()),
    )
    for own in runs:
        config = parse_run_config(settings_line(own))
        with patch("distca.train.run.loop.plot_balance"), patch("distca.train.run.loop.plot_phases"):
            run_on(world, config, open_corpus(config))


def keep_results(subject: str, ranks: int, found: dict[str, Any]) -> None:
    """Write what tests/gpu/test_SUBJECT.py measured to gpu_SUBJECT.json in the folder DISTCA_RESULTS, if it is set."""
    if "DISTCA_RESULTS" not in os.environ:
        return
    report = header(f"pytest tests/gpu/test_{subject}.py", ranks) | found
    write_report(Path(os.environ["DISTCA_RESULTS"]) / f"gpu_{subject}.json", report)
