"""The settings that a checkpoint belongs to, the place where its data stood, and resuming from it."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distca.data.sampler import Sampler
from distca.errors import ConfigError, DamagedCheckpointError, DistcaError
from distca.json_file import read_object
from distca.models.experts import Experts
from distca.models.hybrid import Hybrid
from distca.models.latent import Latent
from distca.models.rope import RopeScaling
from distca.models.variant import Variant
from distca.train.checkpoint.integrity import check_contents, damaged
from distca.train.config.cli import by_setting, flat
from distca.train.config.schema import RunConfig
from distca.train.run.run_folder import Checkpoint, RunFolder

if TYPE_CHECKING:
    from distca.train.run.builder import Trainer
    from megatron_patches.ranks.world import World

logger = logging.getLogger(__name__)

_FORMAT = "whole parameters"
"""How tensors are saved; earlier versions saved the optimizer's state as each rank held it."""
FITS_FILE = "fits.json"
"""The file of settings that a run must have alike to resume, readable without torch."""
_WARMUP = "optimizer.warmup_steps"
_STEP_TOKENS = "tokens of a step at most"
_MEANT_TO_CHANGE = ("name", "output", "checkpoint.resume", "checkpoint.export", "train.steps", _WARMUP)
_EARLIER = {
    "model.qkv_bias": False,
    "model.qk_norm": False,
    "model.layer_types": ["full"],
    "model.window": 0,
    "model.sinks": False,
    "model.rope_scaling": asdict(RopeScaling()),
    "model.variant": asdict(Variant()),
    "model.experts": asdict(Experts()),
    "model.hybrid": asdict(Hybrid()),
    "model.latent": asdict(Latent()),
}
"""The values of these settings in checkpoints of earlier versions, which did not write them down."""


def fits(trainer: Trainer, sampler_state: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of fits.json in a checkpoint."""
    return _identity(trainer.config, trainer.vocabulary) | {
        "sampler": sampler_state,
        _WARMUP: trainer.config.resolved_warmup_steps,
        _STEP_TOKENS: _step_tokens(trainer.config, trainer.world.size),
    }


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
        DamagedCheckpointError: it is not what was saved, or holds code, of which nothing was run.
        ConfigError: its tensors are those of another model, although its fits.json fits.
    """
    from megatron_patches.checkpoint.save_load import load_checkpoint
    from megatron_patches.checkpoint.unpickling import UnreadableError

    try:
        extra = load_checkpoint(checkpoint.path, trainer.model, trainer.optimizer)  # type: ignore[arg-type]
    except UnreadableError as error:
        raise damaged(checkpoint.path, str(error)) from None
    assert extra["step"] == checkpoint.step
    logger.info("Resumed from %s", checkpoint.path)
    sampler: dict[str, Any] = extra["sampler"]
    return sampler


def check_fits(checkpoint: Path, config: RunConfig, vocabulary: int, sampler: Sampler | None) -> None:
    """Refuse a checkpoint that does not fit this run, before anything is built.

    Args:
        checkpoint: its folder.
        config: the run.
        vocabulary: token ids of the data.
        sampler: over the run's documents; moved to where the checkpoint's stood. None where they may be others.

    Raises:
        ConfigError: naming each setting that differs.
        DamagedCheckpointError: naming what cannot be read.
        DataError: the documents or their order are others.
    """
    saved = _read_fits(checkpoint)
    own = _identity(config, config.model.vocabulary or vocabulary)
    before = {name: _before(saved, name) for name in own}
    differing = [f"{name} was {before[name]}, now {own[name]}" for name in own if before[name] != own[name]]
    if differing:
        first = config.checkpoint.init_from
        gone = (
            f" checkpoint.init_from is {first}, which is gone, and with it the model's shape and the tokenizer: put it "
            "back, or start with --config and the config.yaml of the run, and data.tokenizer where there is text."
        )
        raise ConfigError(
            f"{checkpoint} does not fit this run: {'; '.join(differing)}. Restore what was, or start without "
            f"checkpoint.resume.{gone if first and not Path(first).is_dir() else ''}"
        )
    try:
        if sampler is not None:
            sampler.load_state_dict(saved["sampler"])
    except DistcaError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise damaged(checkpoint, f"{FITS_FILE} does not say where the data stood ({error})") from None


def with_saved_warmup(config: RunConfig, checkpoint: Path) -> RunConfig:
    """The configuration of a resumed run: where it names no warm-up, that of the run that saved ``checkpoint``,
    whatever train.steps is now."""
    if config.optimizer.warmup_steps is not None:
        return config
    warmup = _read_fits(checkpoint).get(_WARMUP, config.resolved_warmup_steps)
    return replace(config, optimizer=replace(config.optimizer, warmup_steps=warmup))


def changes_since(run: RunFolder, checkpoint: Checkpoint, config: RunConfig, world_size: int) -> list[str]:
    """Returns, in words, each setting that differs from the part of the run that saved the checkpoint.

    Nothing forbids these changes. But a setting that was left out on the command line this time has its default again.

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
        saved = read_object(checkpoint / FITS_FILE)
    except (OSError, ValueError) as error:
        raise damaged(checkpoint, f"{FITS_FILE} cannot be read ({error})") from None
    if "sampler" not in saved:
        raise damaged(checkpoint, f"{FITS_FILE} does not say where the data stood")
    return saved


def _before(saved: dict[str, Any], name: str) -> Any:
    """Returns the value of a setting in a checkpoint. Where an earlier version did not write it down, or not all of it,
    it is that version's."""
    value, earlier = saved.get(name, _EARLIER.get(name)), _EARLIER.get(name)
    return earlier | value if isinstance(earlier, dict) and isinstance(value, dict) else value


def _identity(config: RunConfig, vocabulary: int) -> dict[str, Any]:
    """Returns the settings on which a checkpoint's tensors depend."""
    model = {f"model.{name}": value for name, value in asdict(config.model).items()}
    if config.model.rope_scaling.kind == "none":
        model["model.rope_scaling"] = _EARLIER["model.rope_scaling"]  # all else of it has no effect
    model["model.vocabulary"] = vocabulary
    model["model.head_dim"] = config.model.resolved_head_dim
    model["train.precision"] = config.train.precision
    model["optimizer.distributed"] = config.optimizer.distributed
    model["checkpoint.format"] = _FORMAT
    return model
