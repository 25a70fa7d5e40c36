"""Saving and resuming a run: the checkpoint's place, what it belongs to, and where the data stood."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distca.data.sampler import Sampler
from distca.errors import CheckpointError, ConfigError, DamagedCheckpointError
from distca.models.rope import RopeScaling
from distca.train.checkpoint.integrity import FileFacts, check_contents, damaged, describe_files, write_durably
from distca.train.config.cli import by_setting, flat
from distca.train.config.schema import RunConfig
from distca.train.metrics.progress import format_bytes
from distca.train.run.run_folder import Checkpoint, RunFolder

if TYPE_CHECKING:
    from distca.train.run.builder import Trainer
    from megatron_patches.world import World

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
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    free = format_bytes(shutil.disk_usage(nearest).free)
    first = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
    return CheckpointError(f"{path} could not be written by rank {rank} ({first}); {free} are free there.")


def save(trainer: Trainer, folder: RunFolder, step: int, sampler_state: dict[str, Any]) -> None:
    """Write the checkpoint after ``step`` steps and delete the oldest ones; every rank calls it.

    Raises:
        CheckpointError: on every rank, if one cannot write its part or rank 0 cannot see it. What was written is
            deleted, so that it takes no room.
    """
    path, began = folder.checkpoint_path(step), time.perf_counter()
    logger.info("Saving %s", path)
    with _alike_on_all_ranks(trainer.world, path):
        if trainer.world.rank == 0:
            folder.clear_checkpoint(step)
    written = _write(trainer, path, {"step": step, "sampler": sampler_state})
    with _alike_on_all_ranks(trainer.world, path):
        if trainer.world.rank == 0:
            _check_all_here(path, written)
            fits = _identity(trainer.config, trainer.vocabulary) | {
                "sampler": sampler_state,
                _WARMUP: trainer.config.resolved_warmup_steps,
                _STEP_TOKENS: _step_tokens(trainer.config, trainer.world.size),
            }
            write_durably(path / _FITS_FILE, json.dumps(fits, indent=1))
            folder.mark_complete(step, {name: facts for files in written for name, facts in files.items()})
    if trainer.world.rank == 0:
        folder.prune(trainer.config.checkpoint.keep)
        size = sum(file.stat().st_size for file in path.iterdir())
        logger.info("Saved %s: %s in %.1f s", path, format_bytes(size), time.perf_counter() - began)


def _write(trainer: Trainer, path: Path, extra: dict[str, Any]) -> list[dict[str, FileFacts]]:
    """Write every rank's part; what each knows of its own files, on rank 0."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.api import CheckpointException

    from megatron_patches.checkpoint.save_load import save_checkpoint

    rank, mine = trainer.world.rank, dict[str, FileFacts]()
    with _alike_on_all_ranks(trainer.world, path):
        try:
            save_checkpoint(path, trainer.model, trainer.optimizer, extra)  # type: ignore[arg-type]
        except CheckpointException as error:
            raise _not_written(path, error.failures) from None
        mine = describe_files(path, [file.name for file in sorted(path.glob(f"__{rank}_*"))])
    everyone: list[Any] = [None] * trainer.world.size
    dist.gather_object(mine, everyone if rank == 0 else None)
    return everyone


@contextmanager
def _alike_on_all_ranks(world: World, path: Path) -> Iterator[None]:
    """Raise on every rank, once all are here, what one of them could not write, and delete what was written."""
    import torch.distributed as dist

    said: CheckpointError | None = None
    try:
        yield
    except CheckpointError as error:
        said = error
    except OSError as error:
        said = _not_written(path, {world.rank: (error, None)})
    everyone = [said] * world.size
    dist.all_gather_object(everyone, said)
    failed = next((each for each in everyone if each is not None), None)
    if failed is not None:
        shutil.rmtree(path, ignore_errors=True)
        raise failed


def _check_all_here(path: Path, written: list[dict[str, FileFacts]]) -> None:
    """Whether rank 0 finds what all ranks wrote: each node may have written into a folder of its own."""
    for rank, files in enumerate(written):
        for name, facts in files.items():
            file = path / name
            if not file.is_file() or _size(file) != facts["bytes"]:
                raise CheckpointError(
                    f"Rank {rank} wrote {name} of {path}, which rank 0 does not find there: their nodes do not share "
                    "this folder. Let output name one that they share."
                )


def _size(file: Path) -> int:
    """Bytes of a file that another rank may have written just now."""
    with file.open("rb") as opened:  # network file systems look at the file itself, and not at a memory, when opening
        return os.fstat(opened.fileno()).st_size


def check_contents_together(checkpoint: Checkpoint, world: World) -> str:
    """Compare a checkpoint with its checksums, a part on each rank; what is wrong, alike on all ranks, or ""."""
    import torch.distributed as dist

    said = ""
    try:
        check_contents(checkpoint.path, world.rank, world.size)
    except DamagedCheckpointError as error:
        said = str(error)
    everyone = [said] * world.size
    dist.all_gather_object(everyone, said)
    return next(filter(None, everyone), "")


def load(trainer: Trainer, checkpoint: Checkpoint) -> dict[str, Any]:
    """Restore a checkpoint; returns the sampler's state. Every rank calls it.

    Raises:
        DamagedCheckpointError: it is not what was saved, or is more than data, of which nothing was run.
    """
    from megatron_patches.checkpoint.save_load import UnreadableError, load_checkpoint

    try:
        extra = load_checkpoint(checkpoint.path, trainer.model, trainer.optimizer)  # type: ignore[arg-type]
    except UnreadableError as error:
        raise damaged(checkpoint.path, str(error)) from None
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
