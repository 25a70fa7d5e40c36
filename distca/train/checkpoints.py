"""Saving and resuming a run: the checkpoint's place, what it belongs to, and where the data stood."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distca.data.sampler import Sampler
from distca.train.run_folder import Checkpoint, RunFolder
from distca.train.settings import ConfigError, RunConfig

if TYPE_CHECKING:
    from distca.train.setup import Trainer

logger = logging.getLogger(__name__)

_FITS_FILE = "fits.json"
"""What a run that resumes must have alike, readable without torch."""


def save(trainer: Trainer, folder: RunFolder, step: int, sampler_state: dict[str, Any]) -> None:
    """Write the checkpoint after ``step`` steps and delete the oldest ones; every rank calls it."""
    import torch.distributed as dist

    from megatron_patches.checkpoint import save_checkpoint

    path = folder.checkpoint_path(step)
    if trainer.world.rank == 0:
        path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    save_checkpoint(path, trainer.model, trainer.optimizer, {"step": step, "sampler": sampler_state})  # type: ignore[arg-type]
    dist.barrier()
    if trainer.world.rank == 0:
        fits = _identity(trainer.config, trainer.vocabulary) | {"sampler": sampler_state}
        (path / _FITS_FILE).write_text(json.dumps(fits, indent=1))
        folder.mark_complete(step)
        folder.prune(trainer.config.checkpoint.keep)
        logger.info("Saved %s", path)


def load(trainer: Trainer, checkpoint: Checkpoint) -> dict[str, Any]:
    """Restore a checkpoint; returns the sampler's state. Every rank calls it."""
    import torch

    from megatron_patches.checkpoint import load_checkpoint

    _allocate_state(trainer.optimizer.optimizer)  # type: ignore[attr-defined]
    with torch.no_grad():  # megatron copies into float32 weights themselves
        extra = load_checkpoint(checkpoint.path, trainer.model, trainer.optimizer)  # type: ignore[arg-type]
    assert extra["step"] == checkpoint.step
    _restore_step(trainer.optimizer.optimizer, checkpoint.step)  # type: ignore[attr-defined]
    logger.info("Resumed from %s", checkpoint.path)
    sampler: dict[str, Any] = extra["sampler"]
    return sampler


def _adams(optimizer: Any) -> Iterator[Any]:
    """torch's Adam optimizers inside megatron's; Apex's and Transformer Engine's need none of the help below."""
    import torch

    if hasattr(optimizer, "chained_optimizers"):
        for part in optimizer.chained_optimizers:
            yield from _adams(part)
    elif isinstance(optimizer.optimizer, torch.optim.Adam | torch.optim.AdamW):
        yield optimizer.optimizer


def _allocate_state(optimizer: Any) -> None:
    """Give every weight an Adam state to load into.

    torch's Adam makes it at the first step, and megatron's distributed optimizer (0.16.1) cannot load without it: it
    reads the number of steps from the state.
    """
    import torch

    for adam in _adams(optimizer):
        for group in adam.param_groups:
            for weight in group["params"]:
                if not adam.state[weight]:
                    moments = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
                    adam.state[weight] = {"step": torch.tensor(0.0)} | moments


def _restore_step(optimizer: Any, step: int) -> None:
    """Set the number of steps that Adam corrects its moments by.

    megatron's distributed optimizer (0.16.1) gives all weights one common tensor for it, which every weight's update
    would then count up, and leaves the value from before the load in it.
    """
    import torch

    for adam in _adams(optimizer):
        for state in adam.state.values():
            state["step"] = torch.tensor(float(step))


def check_fits(checkpoint: Path, config: RunConfig, vocabulary: int, sampler: Sampler) -> None:
    """Refuse a checkpoint that does not fit this run, before anything is built.

    Args:
        checkpoint: its folder.
        config: the run.
        vocabulary: token ids of the data.
        sampler: over the run's documents; moved to where the checkpoint's stood.

    Raises:
        ConfigError: naming each size that differs.
        DataError: the documents or their order are others.
    """
    saved = json.loads((checkpoint / _FITS_FILE).read_text())
    own = _identity(config, config.model.vocabulary or vocabulary)
    differing = [f"{name} was {saved.get(name)}, now {own[name]}" for name in own if saved.get(name) != own[name]]
    if differing:
        raise ConfigError(
            f"{checkpoint} does not fit this run: {'; '.join(differing)}. Restore what was, or start without "
            "checkpoint.resume."
        )
    sampler.load_state_dict(saved["sampler"])


def _identity(config: RunConfig, vocabulary: int) -> dict[str, Any]:
    """What a checkpoint's tensors depend on."""
    model = {f"model.{name}": value for name, value in asdict(config.model).items() if name != "init_std"}
    model["model.vocabulary"] = vocabulary
    model["model.head_dim"] = config.model.resolved_head_dim
    model["train.precision"] = config.train.precision
    model["optimizer.distributed"] = config.optimizer.distributed
    if config.optimizer.distributed:
        # Its state is saved as each tensor-parallel rank holds it; other numbers of data-parallel ranks can read that.
        model["parallel.tp"] = config.parallel.tp
    return model
