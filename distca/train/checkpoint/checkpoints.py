"""Saving and resuming a run: the checkpoint's place, what it belongs to, and where the data stood."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distca.data.sampler import Sampler
from distca.errors import CheckpointError, ConfigError
from distca.models.rope import RopeScaling
from distca.train.config.cli import by_setting, flat
from distca.train.config.schema import RunConfig
from distca.train.metrics.progress import format_bytes
from distca.train.run.run_folder import Checkpoint, RunFolder, damaged

if TYPE_CHECKING:
    from distca.train.run.builder import Trainer

logger = logging.getLogger(__name__)

_FORMAT = "whole parameters"
"""How tensors are saved; earlier versions saved the optimizer's state as each rank held it."""
_FITS_FILE = "fits.json"
"""What a run that resumes must have alike, readable without torch."""
_WARMUP = "optimizer.warmup_steps"
_STEP_TOKENS = "tokens of a step at most"
_MEANT_TO_CHANGE = ("name", "output", "checkpoint.resume", "checkpoint.export", "train.steps", _WARMUP)
_EARLIER = {"model.qkv_bias": False, "model.qk_norm": False, "model.rope_scaling": asdict(RopeScaling())}
"""What earlier versions had, which did not write it down."""


def _not_written(path: Path, failures: Mapping[int, tuple[BaseException, object]]) -> CheckpointError:
    """The error for a checkpoint folder and what went wrong, by rank, with its trace."""
    rank, (cause, _) = next(iter(failures.items()))
    while cause.__context__ is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    free = format_bytes(shutil.disk_usage(path).free)
    first = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
    return CheckpointError(f"{path} could not be written by rank {rank} ({first}); {free} are free there.")


def save(trainer: Trainer, folder: RunFolder, step: int, sampler_state: dict[str, Any]) -> None:
    """Write the checkpoint after ``step`` steps and delete the oldest ones; every rank calls it.

    Raises:
        CheckpointError: on every rank, if one cannot write its part.
    """
    import torch.distributed as dist
    from torch.distributed.checkpoint.api import CheckpointException

    from megatron_patches.checkpoint.save_load import save_checkpoint

    path, began = folder.checkpoint_path(step), time.perf_counter()
    logger.info("Saving %s", path)
    if trainer.world.rank == 0:
        folder.clear_checkpoint(step)
    dist.barrier()
    try:
        save_checkpoint(path, trainer.model, trainer.optimizer, {"step": step, "sampler": sampler_state})  # type: ignore[arg-type]
    except CheckpointException as error:
        raise _not_written(path, error.failures) from None
    dist.barrier()
    if trainer.world.rank == 0:
        fits = _identity(trainer.config, trainer.vocabulary) | {
            "sampler": sampler_state,
            _WARMUP: trainer.config.resolved_warmup_steps,
            _STEP_TOKENS: _step_tokens(trainer.config, trainer.world.size),
        }
        (path / _FITS_FILE).write_text(json.dumps(fits, indent=1))
        folder.mark_complete(step)
        folder.prune(trainer.config.checkpoint.keep)
        size = sum(file.stat().st_size for file in path.iterdir())
        logger.info("Saved %s: %s in %.1f s", path, format_bytes(size), time.perf_counter() - began)


def load(trainer: Trainer, checkpoint: Checkpoint) -> dict[str, Any]:
    """Restore a checkpoint; returns the sampler's state. Every rank calls it."""
    from megatron_patches.checkpoint.save_load import load_checkpoint

    extra = load_checkpoint(checkpoint.path, trainer.model, trainer.optimizer)  # type: ignore[arg-type]
    assert extra["step"] == checkpoint.step
    logger.info("Resumed from %s", checkpoint.path)
    sampler: dict[str, Any] = extra["sampler"]
    return sampler


def check_fits(checkpoint: Path, config: RunConfig, vocabulary: int, sampler: Sampler) -> None:
    """Refuse a checkpoint that does not fit this run, before anything is built.

    Args:
        checkpoint: its folder.
        config: the run.
        vocabulary: token ids of the data.
        sampler: over the run's documents; moved to where the checkpoint's stood.

    Raises:
        ConfigError: naming each size that differs, or what cannot be read.
        DataError: the documents or their order are others.
    """
    saved = _read_fits(checkpoint)
    own = _identity(config, config.model.vocabulary or vocabulary)
    before = {name: saved.get(name, _EARLIER.get(name)) for name in own}
    differing = [f"{name} was {before[name]}, now {own[name]}" for name in own if before[name] != own[name]]
    if differing:
        raise ConfigError(
            f"{checkpoint} does not fit this run: {'; '.join(differing)}. Restore what was, or start without "
            "checkpoint.resume."
        )
    sampler.load_state_dict(saved["sampler"])


def with_saved_warmup(config: RunConfig, checkpoint: Path) -> RunConfig:
    """The configuration of a resumed run: where it names no warm-up, that of the run that saved ``checkpoint``,
    whatever train.steps is now."""
    if config.optimizer.warmup_steps is not None:
        return config
    warmup = _read_fits(checkpoint).get(_WARMUP, config.resolved_warmup_steps)
    return replace(config, optimizer=replace(config.optimizer, warmup_steps=warmup))


def changes_since(run: RunFolder, checkpoint: Checkpoint, config: RunConfig, world_size: int) -> list[str]:
    """What a resumed run does otherwise than the part that saved its checkpoint, in words: nothing forbids it, but a
    setting that was left out on the command line this time has its default again.

    Args:
        run: its folder.
        checkpoint: from which it goes on.
        config: its settings now.
        world_size: its ranks now.
    """
    before, now = flat(run.settings_before(checkpoint.step)), by_setting(config)
    changes = [
        f"{name} was {before[name]}, now {now[name]}"
        for name in now
        if name in before and before[name] != now[name] and name not in _MEANT_TO_CHANGE
    ]
    saved = _read_fits(checkpoint.path).get(_STEP_TOKENS)
    if saved is not None and saved != (tokens := _step_tokens(config, world_size)):
        changes.append(f"a step had {saved:,} tokens at most, now {tokens:,}")
    return changes


def _step_tokens(config: RunConfig, world_size: int) -> int:
    ranks = config.parallel.data_parallel(world_size)
    return ranks * config.data.tokens_per_rank * config.train.micro_batches


def _read_fits(checkpoint: Path) -> dict[str, Any]:
    try:
        saved = json.loads((checkpoint / _FITS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(checkpoint, f"{_FITS_FILE} cannot be read ({error})") from None
    if not isinstance(saved, dict) or "sampler" not in saved:
        raise damaged(checkpoint, f"{_FITS_FILE} does not say where the data stood")
    return saved


def _identity(config: RunConfig, vocabulary: int) -> dict[str, Any]:
    """What a checkpoint's tensors depend on."""
    model = {f"model.{name}": value for name, value in asdict(config.model).items() if name != "init_std"}
    if config.model.rope_scaling.kind == "none":
        model["model.rope_scaling"] = _EARLIER["model.rope_scaling"]  # all else of it has no effect
    model["model.vocabulary"] = vocabulary
    model["model.head_dim"] = config.model.resolved_head_dim
    model["train.precision"] = config.train.precision
    model["optimizer.distributed"] = config.optimizer.distributed
    model["checkpoint.format"] = _FORMAT
    return model
