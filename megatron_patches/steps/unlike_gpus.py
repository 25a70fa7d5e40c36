"""Cost tables of a pool with several kinds of GPUs: each server counts with the table of its own GPU.

A *server* is a rank or another process that computes core attention; the *pool* is all servers of a plan.
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
        tp: number of tensor-parallel ranks. Together they are a server, which counts with the GPU of the first of them.
        gpu: the name of this rank's GPU.
        others: names of GPUs of the servers without a model, which follow the ranks.
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
    """Returns cost models in which each server has the table of its own GPU.

    If a table is missing, all servers count as the first one.

    Args:
        costs: by kind of layer, the cost model of the first server's GPU.
        gpus: [servers] the names of their GPUs.
        find: a function that returns the same for a GPU by name; None if there is no table.
        warns: whether to warn of a missing table; not needed where the user says how fast each server is.

    Raises:
        PlanError: tables are for different tiles.
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
            "The pool has unlike GPUs (%s), and no cost table of each for this kernel and these heads. So plans take "
            "all for as fast as the first: measure tables with `distca profile`, or set speeds (cad.speeds).",
            ", ".join(kinds),
        )
    return costs


def linear_factors(cost: CostModel, homes: int) -> tuple[float, ...]:
    """Returns, for each of the first ``homes`` servers, the time of its linear layers over that of the first table's.

    It is 1 where a table says nothing of linear layers."""
    if not isinstance(cost, PoolCost):
        return (1.0,) * homes
    first, rates = cost.tables[0].linear, [cost.tables[number].linear for number in cost.of_server[:homes]]
    return tuple(
        1.0 if first is None or rate is None else (rate.forward + rate.backward) / (first.forward + first.backward)
        for rate in rates
    )
