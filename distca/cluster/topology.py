"""Finds which ranks share a machine: for the planner, which avoids bytes between machines, and for host memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch.distributed as dist

from distca.cluster.process import machine_name
from distca.errors import PlanError
from distca.plan import Links

logger = logging.getLogger(__name__)


def pool_links(tp: int, ranks_per_node: int = 0, others: Sequence[str] = ()) -> Links:
    """Returns which servers share a node, the same on every rank; all ranks call it together.

    A server is a rank that computes core attention; consecutive tensor-parallel ranks count as one server here.

    Args:
        tp: number of tensor-parallel ranks. A server is taken to be on the machine of the first of them.
        ranks_per_node: number of consecutive servers that the user calls a node; 0 finds it by the machines.
        others: machines of the servers without a model, which follow the ranks.

    Raises:
        PlanError: ``ranks_per_node`` does not divide the number of servers.
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
    """Returns the links between servers, given the name of each server's machine.

    Plans treat all servers as on one machine, if machines have different numbers of them, or a machine's servers do not
    follow each other."""
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


def fullest_node(need: int, free: int, group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Returns the bytes that ranks need and the bytes that are free on the machine where the former fill most of the
    latter.

    Args:
        need: bytes of host memory that this rank needs.
        free: free bytes of host memory on this rank's machine.
        group: the ranks, which all call it together; None for all.
    """
    mine: Any = (machine_name(), need, free)
    everyone = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    nodes = [list(ranks) for _, ranks in groupby(sorted(everyone), key=lambda rank: rank[0])]
    shares = [(sum(need for _, need, _ in ranks), min(free for *_, free in ranks)) for ranks in nodes]
    return max(shares, key=lambda share: share[0] / max(share[1], 1))
