"""Settings of pretrain_llama.py that the benchmark sets itself or does not use, and what to use instead.

It needs the standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable

from distca.errors import LaunchError
from distca.train.config.environment import settings_among

CONTEXT = "data.context_length"
STAGES = "parallel.pp"
_DOCUMENTS = "MIX (--mixes)"
_INSTEAD = {
    "name": "NAME (--output)",
    "output": "NAME (--output)",
    STAGES: "benchmarks/example-4d-parallel/run4d.sh",
    "cad.enabled": "MODE (--modes)",
    CONTEXT: "CONTEXT_LENGTH (--contexts)",
    "train.steps": "BATCHES (--batches)",
    "log.memory": "the peak memory in table.md",
} | dict.fromkeys(("data.source", "data.path", "data.whole_documents"), _DOCUMENTS)
_WITHOUT = {
    *("data.field", "data.conversations", "data.tokenizer", "data.begin_token", "data.end_token", "data.cache"),
    *("data.longer", "data.validation_fraction"),
    *("optimizer.lr", "optimizer.min_lr", "optimizer.warmup_steps", "optimizer.schedule", "optimizer.decay_steps"),
    *("train.loss", "train.time_limit", "train.evaluate", "train.validate_every", "train.validate_batches"),
    *("checkpoint.save_every", "checkpoint.save_every_minutes", "checkpoint.save_at_end", "checkpoint.background"),
    *("checkpoint.resume", "checkpoint.export", "checkpoint.keep"),
    *("log.every", "log.timeline_steps", "log.profile_steps", "log.tensorboard", "log.wandb"),
}


def refuse_unused(arguments: Iterable[str], used: Iterable[str] = ()) -> None:
    """Refuse settings of a command line that would do nothing. Those of a file named by ``--config`` stay: training
    may use the file, too.

    Args:
        arguments: settings as a user gave them.
        used: of these settings, those that have a use here.

    Raises:
        LaunchError: there are some, all named.
    """
    named = {option.removeprefix("--") for option in settings_among(arguments)} - set(used)
    found = sorted(named & (_INSTEAD.keys() | _WITHOUT))
    if not found:
        return
    steps = [f"use {_INSTEAD[name]} in place of {name}" for name in found if name in _INSTEAD]
    left_out = [name for name in found if name not in _INSTEAD]
    steps += [f"leave out {', '.join(left_out)}"] * bool(left_out)
    raise LaunchError(
        f"The benchmark sets by itself, or does not use, what is given by {', '.join(found)}.", f"{'; '.join(steps)}."
    )
