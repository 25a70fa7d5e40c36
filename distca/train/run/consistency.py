"""All ranks must be started alike: otherwise one waits for rows that nobody sends."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist

from distca.data.corpus import Corpus
from distca.errors import ConfigError
from distca.train.config.cli import by_setting
from distca.train.config.schema import RunConfig

if TYPE_CHECKING:
    from megatron_patches.ranks.world import World

_MAY_DIFFER = ("name", "output", "data.path")
"""Settings that ranks may have differently: rank 0's counts, or what is found there is compared."""


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
