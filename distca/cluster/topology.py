"""The servers that share a machine: the planner sets a higher price on bytes between machines."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby

import torch.distributed as dist

from distca.cluster.hostname import machine_name
from distca.errors import PlanError
from distca.plan import Links

logger = logging.getLogger(__name__)


def pool_links(tp: int, ranks_per_node: int = 0, others: Sequence[str] = ()) -> Links:
    """The same on every rank; every rank of the world calls it together.

    Args:
        tp: tensor-parallel ranks, which are consecutive; a server is where the first of them is.
        ranks_per_node: consecutive servers that share a node, whatever machines they are on; 0 asks the machines.
        others: machines of the pool's servers without a model, which follow those of the world.

    Raises:
        PlanError: such nodes do not divide the servers.
    """
    servers = dist.get_world_size() // tp + len(others)
    if ranks_per_node < 0 or (ranks_per_node and servers % ranks_per_node):
        raise PlanError(
            f"`ranks_per_node` is {ranks_per_node}, which does not divide the {servers} servers of the pool; give a "
            "divisor, or 0 for the servers of one machine."
        )
    if ranks_per_node:
        return Links(0 if ranks_per_node == servers else ranks_per_node)
    machines: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(machines, machine_name())
    return links_of([*machines[::tp], *others])


def links_of(machines: list[str]) -> Links:
    """Links of servers on ``machines``, the name of each server's."""
    runs = [len(list(run)) for _, run in groupby(machines)]
    if len(set(machines)) == 1:
        return Links()
    if len(set(machines)) < len(runs) or len(set(runs)) > 1:
        logger.warning(
            "Plans do not know which of the %d servers share a machine, because machines have different numbers of "
            "them, or not consecutive ones, so more rows may travel between them: start equally many ranks on each.",
            len(machines),
        )
        return Links()
    logger.info("Plans prefer servers on the same machine: %d machines of %d.", len(runs), runs[0])
    return Links(runs[0])
