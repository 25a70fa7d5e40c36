"""A check that all ranks have the same configuration, as one rank's attention is computed on others, by theirs."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core.transformer import TransformerConfig

from distca.errors import SupportError
from megatron_patches.support.attached import fields_of


def check_same_on_ranks(config: TransformerConfig, arguments: dict[str, Any]) -> None:
    """Refuses a configuration or arguments that differ between ranks; all ranks call it together.

    Args:
        config: Megatron's configuration.
        arguments: arguments of :class:`megatron_patches.api.CAD`, by name.

    Raises:
        SupportError: a value differs; all ranks raise it and name the first.
    """
    plain = (bool, int, float, str, type(None))
    mine = {name: value for name, value in (fields_of(config) | arguments).items() if isinstance(value, plain)}
    everyone: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for name, first in everyone[0].items():
        for rank, theirs in enumerate(everyone):
            if repr(theirs.get(name)) != repr(first):  # nan is not equal to itself, but its text is
                raise SupportError(
                    f"{name} is {theirs.get(name)!r} on rank {rank} and {first!r} on rank 0: give every rank the same."
                )
