"""Makes cost models for servers with different GPUs or attention kernels.

A *server* computes core attention. It consists of as many processes as the tensor-parallel size: ranks that train, or
processes without a model. A server's GPU model and kernel are its *sort*. A *cost table* has the measured seconds of
attention on one sort.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from distca.attention.select import BY_SPEED
from distca.cluster.agreement import of_ranks
from distca.plan import CostModel
from distca.plan.cost.pool import PoolCost

logger = logging.getLogger(__name__)


class ServerSort(NamedTuple):
    """The GPU and kernel of a server.

    Attributes:
        gpu: the name of the GPU model; "cpu" without a GPU.
        kernel: the name of the kernel, such as "flash4", or "flash4+torch": forward with flash4, backward with torch.
    """

    gpu: str
    kernel: str

    def __str__(self) -> str:
        return f"{self.gpu} with {self.kernel}"


def pool_sorts(tp: int, own: ServerSort, others: Sequence[ServerSort]) -> list[ServerSort]:
    """Returns the sort of every server, the same on every rank; all ranks call it together.

    Args:
        tp: tensor-parallel size. If a server's processes differ in sort, the first sort with the slowest kernel counts.
        own: the sort of this rank.
        others: sorts of the processes without a model. Their servers come last in the result.
    """
    everyone = [*of_ranks(own), *others]
    return [_slowest(everyone[at : at + tp]) for at in range(0, len(everyone), tp)]


def _slowest(sorts: Sequence[ServerSort]) -> ServerSort:
    return sorts[0] if len(set(sorts)) == 1 else max(sorts, key=lambda each: BY_SPEED.index(each.kernel))


def costs_by_sort(
    costs: tuple[CostModel, ...],
    sorts: Sequence[ServerSort],
    find: Callable[[ServerSort], tuple[CostModel, ...] | None],
    warns: bool,
) -> tuple[CostModel, ...]:
    """Returns for each kind of layer a cost model in which each server has the table of its sort.

    If a table is missing, all servers get the first server's cost model.

    Args:
        costs: the first server's cost model for each kind of layer, such as layers with a window and layers without.
        find: returns a sort's cost model for each kind of layer; None if there is no table for the sort.
        warns: whether to log a warning if a table is missing.

    Raises:
        PlanError: two tables are for different heads or for tiles of different sizes.
    """
    unlike = list(dict.fromkeys(sorts))
    if len(unlike) == 1:
        return costs
    of_sort = [costs, *(found for sort in unlike[1:] if (found := find(sort)) is not None)]
    if len(of_sort) == len(unlike):
        of_server = tuple(unlike.index(sort) for sort in sorts)
        return tuple(PoolCost(tables, of_server) for tables in zip(*of_sort, strict=True))
    if warns:
        logger.warning(
            "The pool has unlike servers (%s), and some have no cost table of their own for these heads. So plans "
            "count all servers as fast as the first: give `cost_table` a folder with a table of `distca profile` for "
            "each, or set `speeds`.",
            ", ".join(map(str, unlike)),
        )
    return costs


def speeds_beside_others(speeds: Sequence[float], homes: int, sharing: Sequence[int]) -> tuple[float, ...]:
    """Divides each server's speed by the number of processes on its GPU.

    Args:
        speeds: each server's speed alone on its GPU, relative to its cost table; empty if all speeds are 1.
        homes: number of servers whose processes train; they come first, and share no GPU.
        sharing: for each server without a model, the number of processes on the fullest of its GPUs.
    """
    if max(sharing, default=1) == 1:
        return tuple(speeds)
    alone = speeds or (1.0,) * (homes + len(sharing))
    return tuple(each / number for each, number in zip(alone, [*[1] * homes, *sharing], strict=True))


def gb_s_beside_others(gb_s: float, usual: float, sharing: Sequence[int]) -> tuple[float, ...]:
    """Divides a server's GB/s over the network by the number of processes on its GPU.

    Args:
        gb_s: GB/s of a server without a model whose GPUs hold no other process; 0 takes ``usual``.
        usual: GB/s of a server whose processes train.
        sharing: as in :func:`speeds_beside_others`.

    Returns:
        GB/s of each server without a model; empty if all have ``usual``.
    """
    if not gb_s and max(sharing, default=1) == 1:
        return ()
    return tuple((gb_s or usual) / number for number in sharing)


def in_words(sorts: Sequence[ServerSort]) -> str:
    """Returns which servers are of which sort, such as "NVIDIA H200 with flash4: 0, 1; NVIDIA A100 with torch: 2"."""
    return "; ".join(
        f"{sort}: {', '.join(str(server) for server, each in enumerate(sorts) if each == sort)}"
        for sort in dict.fromkeys(sorts)
    )


def linear_factors(cost: CostModel, homes: int) -> tuple[float, ...]:
    """Returns each home's time for linear layers, relative to the first. Homes are the first ``homes`` servers.

    A factor is 1 if the home's table or the first table has no times of linear layers."""
    if not isinstance(cost, PoolCost):
        return (1.0,) * homes
    first, rates = cost.tables[0].linear, [cost.tables[number].linear for number in cost.of_server[:homes]]
    return tuple(
        1.0 if first is None or rate is None else (rate.forward + rate.backward) / (first.forward + first.backward)
        for rate in rates
    )
