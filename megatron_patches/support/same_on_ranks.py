"""Checks that all ranks were given the same: one rank's attention is computed on others, by their configuration."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core.transformer import TransformerConfig

from distca.errors import SupportError
from megatron_patches.support.attached import fields_of


def check_same_on_ranks(config: TransformerConfig, arguments: dict[str, Any]) -> None:
    """Refuse a configuration or arguments that ranks were not given alike; every rank calls it.

    Args:
        config: Megatron's configuration.
        arguments: of :class:`megatron_patches.api.CAD`, by name.

    Raises:
        SupportError: on every rank, naming the first that differs.
    """
    plain = (bool, int, float, str, type(None))
    mine = {name: value for name, value in (fields_of(config) | arguments).items() if isinstance(value, plain)}
    everyone: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for name, first in everyone[0].items():
        for rank, theirs in enumerate(everyone):
            if repr(theirs.get(name)) != repr(first):  # nan is unlike itself
                raise SupportError(
                    f"{name} is {theirs.get(name)!r} on rank {rank} and {first!r} on rank 0: give every rank the same."
                )
