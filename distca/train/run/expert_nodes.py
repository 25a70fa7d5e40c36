"""Whether the ranks that share a layer's experts share a machine, and what their rows take if they do not."""

from __future__ import annotations

import torch.distributed as dist

from distca.cluster.process import machine_name
from distca.train.config.schema import RunConfig

NETWORK_BYTES_PER_S = 50e9
"""Bytes per second of a GPU between machines that the prediction counts with: 400 Gbit/s each way."""
_EXCHANGES = {"none": 4, "mlp": 6, "all": 6}
"""Exchanges of a layer in a step: there and back, forward and backward, and again where experts are recomputed."""


def nodes_warning(config: RunConfig, machines: list[str]) -> str | None:
    """A sentence where expert-parallel ranks span machines.

    Args:
        config: a validated run.
        machines: of every rank, the name of its machine.
    """
    ep, model, train = config.parallel.ep, config.model, config.train
    spread = max(len(set(machines[first : first + ep])) for first in range(0, len(machines), ep))
    if ep == 1 or spread == 1:
        return None
    value = 2 if train.precision == "bf16" else 4
    rows = config.data.tokens_per_rank / config.parallel.tp * train.micro_batches
    layers = sum(kind.mlp.experts.count > 0 for kind in model.layer_kinds) / config.parallel.pp
    copies = ep * (spread - 1) / spread * model.experts.copies_at_each(ep)
    away = copies * rows * model.hidden * value * layers * _EXCHANGES[config.resolved_recompute]
    return (
        f"The {ep} ranks that share experts (parallel.ep) are on {spread} machines: each sends about {away / 1e9:.2g} "
        f"GB to the other machines in a step, which at {NETWORK_BYTES_PER_S / 1e9:g} GB/s takes "
        f"{away / NETWORK_BYTES_PER_S:.2g} s. A parallel.ep that divides the ranks of a machine keeps them inside it."
    )


def machines_of_ranks(config: RunConfig) -> list[str]:
    """The machine of every rank, or where cad.ranks_per_node is set the node that this makes it part of; every rank
    calls it."""
    world = dist.get_world_size()
    if servers := config.cad.ranks_per_node:
        return [str(rank // (servers * config.parallel.tp)) for rank in range(world)]
    machines: list[str] = [""] * world
    dist.all_gather_object(machines, machine_name())
    return machines
