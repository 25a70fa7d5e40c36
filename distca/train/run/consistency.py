"""All ranks must start and plan alike, each on its own: otherwise one waits for rows that nobody sends."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from distca.data.corpus import Corpus
from distca.errors import ConfigError, PlanError
from distca.train.config.cli import RunConfig, by_setting

if TYPE_CHECKING:
    from megatron_patches.world import World

_MAY_DIFFER = ("name", "output", "data.path")
"""Of these rank 0's counts, or what is found there is compared."""


def check_same_start(config: RunConfig, corpus: Corpus, world: World) -> None:
    """Refuse ranks that were started otherwise than rank 0: with other settings, or with other documents, of which
    every rank plans from its own list. Every rank calls it.

    Raises:
        ConfigError: on every rank, naming the ranks and what differs.
    """
    lengths = np.concatenate((corpus.train.lengths, corpus.validation.lengths))
    mine = ({name: value for name, value in by_setting(config).items() if name not in _MAY_DIFFER}, _digest(lengths))
    everyone = [mine] * world.size
    dist.all_gather_object(everyone, mine)
    settings, documents = everyone[0]
    for rank, (theirs, _) in enumerate(everyone):
        if theirs.keys() != settings.keys():
            raise ConfigError(f"Rank {rank} runs another version of distca than rank 0; install the same everywhere.")
        if theirs != settings:
            name = next(name for name in settings if settings[name] != theirs[name])
            raise ConfigError(
                f"Rank {rank} was started with {name} {theirs[name]}, rank 0 with {settings[name]}; start every "
                "machine with the same settings."
            )
    others = [rank for rank, (_, theirs) in enumerate(everyone) if theirs != documents]
    if others:
        raise ConfigError(
            f"Ranks {others} see other documents than rank 0 (another copy of the data, or another Python version with "
            "data.source stdlib); put the same data at data.path on every machine."
        )


def _digest(lengths: np.ndarray) -> str:
    return hashlib.sha256(lengths.tobytes()).hexdigest()


class Agreement:
    """Compares what ranks planned, step by step. All ranks create it together.

    It has process groups of its own, so that the thread that plans can ask while the step before runs.

    Args:
        done: number of the last step that was planned before.
    """

    def __init__(self, done: int = 0) -> None:
        self._group = dist.new_group(backend="gloo")
        self._step = done

    def check(self, fingerprint: int) -> None:
        """Refuse a step that this rank or another planned differently; every rank calls it for every step.

        Args:
            fingerprint: of what this rank planned, as :func:`distca.plan.plan.fingerprint` gives it.

        Raises:
            PlanError: on every rank, naming those that differ from rank 0.
        """
        self._step += 1
        everyone = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(everyone, torch.tensor(fingerprint, dtype=torch.int64), group=self._group)
        others = np.flatnonzero([int(each) != int(everyone[0]) for each in everyone])
        if len(others):
            some = ", ".join(map(str, others[:8])) + (", …" if len(others) > 8 else "")
            raise PlanError(
                f"{len(others)} of {len(everyone)} ranks ({some}) planned step {self._step} differently from rank 0, "
                "so nothing of it was sent. They were started with other settings, have other versions of distca or "
                "numpy, or another kind of processor: compare config.yaml and `distca doctor` on their machines."
            )
