"""Makes cost models of servers with different GPU models: the seconds of a server's tasks follow from its own GPU.

A *server* is a rank, or another process, that computes core attention. A *cost table* has the measured seconds of
attention tasks on one GPU model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch.distributed as dist

from distca.plan import CostModel
from distca.plan.cost.pool import PoolCost

logger = logging.getLogger(__name__)


def pool_gpus(tp: int, gpu: str, others: Sequence[str]) -> list[str]:
    """Returns the name of every server's GPU, the same on every rank; all ranks call it together.

    Args:
        tp: number of tensor-parallel ranks, which together are one server. The first one's GPU counts.
        gpu: the name of this rank's GPU.
        others: names of the GPUs of servers that are not ranks; they come last.
    """
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, gpu)
    return [*names[::tp], *others]


def costs_by_gpu(
    costs: tuple[CostModel, ...],
    gpus: Sequence[str],
    find: Callable[[str], tuple[CostModel, ...] | None],
    warns: bool,
) -> tuple[CostModel, ...]:
    """Returns for each kind of layer a cost model in which each server has the table of its own GPU.

    If a table is missing, all servers get the cost model of the first.

    Args:
        costs: for each kind of layer, the cost model of the first server's GPU.
        gpus: [servers] the name of each server's GPU.
        find: returns for the name of a GPU the cost models of all kinds of layers, or None if it has no table.
        warns: whether to log a warning if a table is missing.

    Raises:
        PlanError: tables are for different sizes of kernel tiles.
    """
    kinds = list(dict.fromkeys(gpus))
    if len(kinds) == 1:
        return costs
    of_gpu = [costs, *(found for gpu in kinds[1:] if (found := find(gpu)) is not None)]
    if len(of_gpu) == len(kinds):
        of_server = tuple(kinds.index(gpu) for gpu in gpus)
        return tuple(PoolCost(tables, of_server) for tables in zip(*of_gpu, strict=True))
    if warns:
        logger.warning(
            "The pool has unlike GPUs (%s), and not each has a cost table for this kernel and these heads. So plans "
            "take all GPUs for as fast as the first: measure tables with `distca profile`, or set `speeds`.",
            ", ".join(kinds),
        )
    return costs


def linear_factors(cost: CostModel, homes: int) -> tuple[float, ...]:
    """Returns for each of the first ``homes`` servers the time of linear layers, relative to the first server's GPU.

    It is 1 if a table has no times of linear layers.
    """
    if not isinstance(cost, PoolCost):
        return (1.0,) * homes
    first, rates = cost.tables[0].linear, [cost.tables[number].linear for number in cost.of_server[:homes]]
    return tuple(
        1.0 if first is None or rate is None else (rate.forward + rate.backward) / (first.forward + first.backward)
        for rate in rates
    )
