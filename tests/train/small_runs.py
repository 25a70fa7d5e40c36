"""Runs of a very small model for tests: a folder of texts, settings, and several runs in one world of gloo ranks."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from distca.data.corpus import Corpus
    from distca.train.config.schema import RunConfig
    from megatron_patches.steps.step import Step

ROOT = Path(__file__).parents[2]
LONGEST = 96
_MIX_TOKENS = 1 << 20
"""Tokens of a mix: many more than a test deals, and drawn in no time."""

SETTINGS = {
    "model.layers": 2,
    "model.hidden": 32,
    "model.ffn": 64,
    "model.heads": 4,
    "model.kv_heads": 2,
    "data.source": "text",
    "data.context_length": LONGEST,
    "data.tokens_per_rank": LONGEST,
    "data.validation_fraction": 0.1,
    "optimizer.lr": 0.01,
    "optimizer.min_lr": 0.001,
    "optimizer.warmup_steps": 2,
    "train.steps": 6,
    "train.validate_batches": 1,
    "log.tensorboard": "false",
}


def write_texts(folder: Path, lengths: list[int] | None = None) -> Path:
    """A folder with one text file per length; by default 60 of 2 to 96 bytes."""
    random = np.random.default_rng(3)
    lengths = random.integers(2, LONGEST + 1, 60).tolist() if lengths is None else lengths
    folder.mkdir(parents=True)
    words = ["the ", "attention ", "of ", "long ", "documents ", "is ", "moved ", "to ", "idle ", "ranks. "]
    for number, length in enumerate(lengths):
        text = "".join(random.choice(words, length))[:length]
        (folder / f"{number:03d}.txt").write_text(text)
    return folder


def arguments(**settings: Any) -> list[str]:
    """A command line of the small settings; ``cad__enabled`` stands for cad.enabled, None leaves a setting out."""
    chosen = SETTINGS | {name.replace("__", "."): value for name, value in settings.items()}
    line = []
    for name, value in chosen.items():
        if value is not None:
            line += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return line


def steps_of(run: Path, key: str = "loss") -> dict[int, float]:
    """A figure of every step that has it, from metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line[key] for line in lines if key in line}
    assert len(lines) == len({line["step"] for line in lines}), "a step is in metrics.jsonl twice"
    return steps


def train_all(command_lines: list[list[str]]) -> list[str]:
    """Train one run after the other on the ranks that call this, without plots; returns their folders."""
    import gc
    from unittest.mock import patch

    import torch
    import torch.distributed as dist

    from distca.train.run.main import run_on, tokenized_corpus
    from megatron_patches.patches.cpu import use_cpu
    from megatron_patches.ranks.groups import destroy_model_parallel
    from megatron_patches.ranks.world import World

    use_cpu()
    logging.getLogger("distca").setLevel(logging.INFO)  # for console.log
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    folders = []
    try:
        for line in command_lines:
            config = _parsed_once(line)
            gc.freeze()  # what is imported is looked at once per process, not once per run
            with patch("distca.train.run.loop.plot_balance"), patch("distca.train.run.loop.plot_phases"):
                folders.append(str(run_on(world, config, tokenized_corpus(config, world)).path))
    finally:
        destroy_model_parallel()
    return folders


def _parsed_once(line: list[str]) -> RunConfig:
    """What a command line asks for, parsed by the first rank for all that have the same one."""
    import torch.distributed as dist

    from distca.train.config.cli import parse_run_config

    first = [(line, parse_run_config(line)) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(first)
    assert first[0] is not None
    theirs, config = first[0]
    return config if theirs == line else parse_run_config(line)


def open_small_corpus(config: RunConfig) -> Corpus:
    """The run's corpus, where a mix has few documents."""
    from functools import partial
    from unittest.mock import patch

    from distca.data.sources import open_source
    from distca.train.data.corpus import open_corpus

    with patch("distca.train.data.corpus.open_source", partial(open_source, mix_tokens=_MIX_TOKENS)):
        return open_corpus(config)


class StepByStep:
    """A trainer whose steps the caller runs, on the ranks that call this; ends with ``close``."""

    def __init__(self, config: RunConfig) -> None:
        import torch
        import torch.distributed as dist

        from distca.train.data.corpus import dealt, open_sampler
        from distca.train.run.builder import build_trainer
        from megatron_patches.ranks.world import World

        self.corpus = open_small_corpus(config)
        self.world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
        self.trainer: Any = build_trainer(config, self.world, self.corpus.vocabulary)
        self._documents = dealt(
            self.corpus.train, open_sampler(config, self.corpus.train, self.trainer.cad.options.ranks), 1000
        )

    def step(self) -> Step:
        """The next one."""
        return self.trainer.cad.plan_step(next(self._documents))

    def run(self, step: Step, forward_only: bool = False) -> None:
        """Forward and backward of a global batch."""
        from megatron_patches.training.training_step import summed_loss_step

        self.trainer.cad.forward_backward(step, summed_loss_step, self.trainer.model, forward_only=forward_only)

    def close(self) -> None:
        from megatron_patches.ranks.groups import destroy_model_parallel

        destroy_model_parallel()
