"""Makes the planner's options from Megatron's configuration and process groups, and from the arguments of ``CAD``.

The planner divides core attention into tasks, and gives each task to a *server*: a rank, or a process without a model.
``cost_models.py`` finds the seconds of tasks. Servers of one *sort* have the same GPU model and kernel.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

from distca.attention import Kernel
from distca.cluster.topology import pool_links
from distca.errors import PlanError
from distca.plan import CostModel, PlanOptions
from distca.plan.cost.linear import LayerWork, NonAttention, between_attentions
from distca.plan.cost.pool import PoolCost, at_speeds
from distca.sizes.fp8_shapes import rows_multiple
from megatron_patches.arguments import CadArguments, How, Level
from megatron_patches.model.layer_kinds import LayerKinds
from megatron_patches.ranks.remote_servers import RemoteServers
from megatron_patches.steps.cost_models import cost_model, cost_of, costs_on
from megatron_patches.steps.layer_work import layer_works
from megatron_patches.steps.unlike_servers import (
    ServerSort,
    costs_by_sort,
    gb_s_beside_others,
    in_words,
    linear_factors,
    pool_sorts,
    speeds_beside_others,
)
from megatron_patches.te.quantization import fp8_of

logger = logging.getLogger(__name__)


def plan_options(
    config: TransformerConfig,
    layer_kinds: LayerKinds,
    kernel: Kernel,
    device: torch.device,
    given: CadArguments,
    how: How,
    remote: RemoteServers | None = None,
) -> PlanOptions:
    """Returns the planner's options, the same on every rank. All ranks must call this together.

    Args:
        kernel: the attention kernel of this rank.
        given: the arguments of ``CAD``.
        how: "keep" if servers keep q, k and v for backward, "resend" if servers get them once more.
        remote: the servers without a model; None without such servers.

    Raises:
        PlanError: the cost table is unusable or was measured for other heads than the model's; ``level`` is "time" and
            there are no measured seconds of linear layers; ``speeds`` is not one number above 0 for each server; or
            ``ranks_per_node`` does not divide the number of servers.
    """
    tp = parallel_state.get_tensor_model_parallel_world_size()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    shares = tp if config.sequence_parallel else 1  # parts into which sequence parallelism splits the rows
    machines, sharing, others = ([], [], []) if remote is None else (remote.machines, remote.sharing, remote.sorts)
    training = parallel_state.get_data_parallel_world_size() * stages  # servers that are ranks
    sorts = pool_sorts(tp, ServerSort(_name(device), kernel.name), others)
    if len(set(sorts)) > 1:
        logger.info("The pool's servers: %s.", in_words(sorts))
    costs, non_attention = _costs(config, layer_kinds, device, given, sorts, training)
    if given.speeds:
        check_speeds(given.speeds, training + len(machines))
    if speeds := speeds_beside_others(given.speeds, training, sharing):
        costs, non_attention = _at_speeds(costs, non_attention, speeds, training)
    links = pool_links(tp, given.ranks_per_node, machines)
    return PlanOptions(
        ranks=parallel_state.get_data_parallel_world_size(),
        cost=costs[0],
        kinds=layer_kinds.kinds,
        costs=costs,
        layer_kinds=layer_kinds.of_stages(stages),
        stages=stages,
        nano_batches=2 if given.disaggregate and given.ping_pong else 1,
        align=rows_multiple(fp8_of(config), shares),
        shares=shares,
        resend=given.disaggregate and how == "resend",
        disaggregate=given.disaggregate,
        tolerance=given.tolerance,
        links=links,
        non_attention=non_attention,
        servers=len(machines),
        server_gb_s=gb_s_beside_others(given.server_gb_s, links.bytes_per_s(far=True) / 1e9, sharing),
        recurrent=bool(layer_kinds.recurrences),
    )


def _costs(
    config: TransformerConfig,
    layer_kinds: LayerKinds,
    device: torch.device,
    given: CadArguments,
    sorts: Sequence[ServerSort],
    training: int,
) -> tuple[tuple[CostModel, ...], NonAttention | None]:
    """Returns a cost model for each kind of layer, and the result of :func:`_non_attention`.

    ``sorts`` has all servers; the first ``training`` servers are ranks that train."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    cost = cost_model(config, sorts[0], given.cost_table)
    costs = tuple(cost_of(kind, cost, sorts[0], given.cost_table) for kind in layer_kinds.kinds)
    if not given.disaggregate:
        return costs, None
    find = partial(costs_on, kinds=layer_kinds.kinds, cost=cost, cost_table=given.cost_table)
    costs = costs_by_sort(costs, sorts, find, warns=dist.get_rank() == 0 and not given.speeds)
    unlike = stages > 1 or bool(given.servers or given.speeds) or isinstance(costs[0], PoolCost)
    # "auto" must not mean "time" on CPUs, where ranks may share cores, nor with NVSHMEM: a server that computes no
    # linear layers could get more rows than its receive memory holds.
    auto_is_time = device.type == "cuda" and unlike and given.ping_pong and given.transport != "nvshmem"
    works = partial(layer_works, config, given.hybrid_layer_pattern, given.recompute == "all")
    non_attention = _non_attention(config, cost, given.level, auto_is_time, works)
    if non_attention is not None and isinstance(costs[0], PoolCost):
        non_attention = replace(non_attention, factors=linear_factors(costs[0], training))
    return costs, non_attention


def _at_speeds(
    costs: tuple[CostModel, ...], non_attention: NonAttention | None, speeds: Sequence[float], training: int
) -> tuple[tuple[CostModel, ...], NonAttention | None]:
    """Divides seconds by ``speeds``: a server of speed s takes 1/s times the seconds of its cost table."""
    slower = tuple(at_speeds(each, speeds) for each in costs)
    if non_attention is None:
        return slower, None
    by_table = non_attention.factors or (1.0,) * training
    factors = tuple(each / speed for each, speed in zip(by_table, speeds[:training], strict=True))
    return slower, replace(non_attention, factors=factors)


def check_speeds(speeds: Sequence[float], servers: int) -> None:
    """Raises PlanError unless ``speeds`` has one finite number above 0 for each of the ``servers`` servers."""
    if len(speeds) != servers or not all(0 < speed < math.inf for speed in speeds):
        raise PlanError(
            f"`speeds` is {tuple(speeds)}; give one number above 0 for each of the pool's {servers} servers, or leave "
            "`speeds` out."
        )


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "cpu"


def _non_attention(
    config: TransformerConfig,
    cost: CostModel,
    level: Level,
    auto_is_time: bool,
    works: Callable[[], Sequence[LayerWork]],
) -> NonAttention | None:
    """Returns the seconds of linear layers between two core attentions, for a row (a token's hidden state).

    The result is None if plans make only attention's seconds equal on all servers.

    Args:
        cost: the first server's seconds of attention tasks; ``cost.linear`` has those of linear layers, or is None.
        works: a function that counts the weights of the linear layers in each layer with attention.
    """
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    tp = parallel_state.get_tensor_model_parallel_world_size()
    rate = cost.linear
    if level == "attention" or (level == "auto" and not auto_is_time):
        return None
    if rate is None:
        if level == "auto":
            logger.info(
                "Plans make only attention's seconds equal, as the first server has no cost table with seconds of "
                "linear layers; `distca profile` measures them."
            )
            return None
        raise PlanError(
            "level is time, but the first server has no cost table with seconds of linear layers: measure one with "
            "`distca profile` and give it as cost_table, or set level to attention."
        )
    fp8 = fp8_of(config)
    if (in_fp8 := rate.in_fp8(fp8)) is None:
        logger.warning(
            "Plans are made as if linear layers were in bfloat16: the cost table has no seconds of linear layers "
            "in FP8 (%s); `distca profile` measures them.",
            fp8,
        )
    of_layers = works()  # all stages have equal layers, so the layers of the first stage are enough
    return between_attentions(in_fp8 or rate, of_layers[: len(of_layers) // stages], tp)
