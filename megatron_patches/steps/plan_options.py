"""Makes the planner's options from Megatron's configuration and process groups, and from the arguments of ``CAD``.

The planner divides core attention into tasks, and gives each task to a *server*: a rank, or a process without a model.
The seconds of tasks come from a *cost table*, which ``distca profile`` measures for a GPU model, a kernel and a shape
of heads; without a table they are estimated. Servers of one *sort* have the same GPU model and kernel. Layers of one
*kind* have the same window, softmax scale, softcap and sinks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

from distca.attention import Kernel
from distca.cluster.agreement import of_first_rank
from distca.cluster.topology import pool_links
from distca.errors import PlanError
from distca.plan import AttentionKind, AttentionShape, CostModel, PlanOptions, TableCost, analytic_cost, area_cost
from distca.plan.cost.analytic import cost_of_kind
from distca.plan.cost.linear import LayerWork, NonAttention, between_attentions
from distca.plan.cost.pool import PoolCost, at_speeds
from distca.plan.cost.table_file import find_table, open_table
from distca.sizes.fp8_shapes import rows_multiple
from megatron_patches.arguments import CadArguments, How, Level
from megatron_patches.model.latent import is_latent, latent_dims
from megatron_patches.model.layer_kinds import LayerKinds
from megatron_patches.ranks.remote_servers import RemoteServers
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
    machines = [] if remote is None else remote.machines
    training = parallel_state.get_data_parallel_world_size() * stages  # servers that are ranks
    sorts = pool_sorts(tp, ServerSort(_name(device), kernel.name), [] if remote is None else remote.sorts)
    if len(set(sorts)) > 1:
        logger.info("The pool's servers: %s.", in_words(sorts))
    cost = cost_model(config, sorts[0], given.cost_table)
    costs = tuple(_cost_of(kind, cost, sorts[0], given.cost_table) for kind in layer_kinds.kinds)
    non_attention = None
    if given.disaggregate:
        find = partial(_costs_on, kinds=layer_kinds.kinds, cost=cost, cost_table=given.cost_table)
        costs = costs_by_sort(costs, sorts, find, warns=dist.get_rank() == 0 and not given.speeds)
        unlike = stages > 1 or bool(given.servers or given.speeds) or isinstance(costs[0], PoolCost)
        # "auto" must not mean "time" on CPUs, where ranks may share cores, nor with NVSHMEM: a server that computes no
        # linear layers could get more rows than its receive memory holds.
        auto_is_time = device.type == "cuda" and unlike and given.ping_pong and given.transport != "nvshmem"
        works = partial(layer_works, config, given.hybrid_layer_pattern, given.recompute == "all")
        non_attention = _non_attention(config, cost, given.level, auto_is_time, works)
    if non_attention is not None and isinstance(costs[0], PoolCost):
        non_attention = replace(non_attention, factors=linear_factors(costs[0], training))
    if given.speeds:
        check_speeds(given.speeds, training + len(machines))
    # A server of speed s takes 1/s times the seconds of its cost table, for attention and for linear layers.
    sharing = [] if remote is None else remote.sharing
    if speeds := speeds_beside_others(given.speeds, training, sharing):
        costs = tuple(at_speeds(each, speeds) for each in costs)
        if non_attention is not None:
            by_table = non_attention.factors or (1.0,) * training
            slower = tuple(each / speed for each, speed in zip(by_table, speeds[:training], strict=True))
            non_attention = replace(non_attention, factors=slower)
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


def check_speeds(speeds: Sequence[float], servers: int) -> None:
    """Raises PlanError unless ``speeds`` has one finite number above 0 for each of the ``servers`` servers."""
    if len(speeds) != servers or not all(0 < speed < math.inf for speed in speeds):
        raise PlanError(
            f"`speeds` is {tuple(speeds)}; give one number above 0 for each of the pool's {servers} servers, or leave "
            "`speeds` out."
        )


def attention_shape(config: TransformerConfig) -> AttentionShape:
    """Returns the number and sizes of core attention's heads on one tensor-parallel rank."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    assert config.num_query_groups is not None and config.kv_channels is not None
    dtype: torch.dtype = config.params_dtype
    key_dim, value_dim = latent_dims(config) if is_latent(config) else (config.kv_channels, 0)
    value_dim = value_dim if value_dim < key_dim else 0  # 0: values are as wide as keys
    heads, kv_heads = config.num_attention_heads // tp, config.num_query_groups // tp
    return AttentionShape(heads, kv_heads, key_dim, dtype.itemsize, value_dim)


def cost_model(config: TransformerConfig, sort: ServerSort, cost_table: str | None = None) -> CostModel:
    """Returns the object that gives the planner the seconds of attention tasks, for one tensor-parallel rank's heads.

    If ``cost_table`` is a file, the object is the file's table. Otherwise it is a table for ``sort`` and these heads,
    from the folder ``cost_table`` or else from the package. If ``cost_table`` is None and the package has no table for
    them, the object is an estimate.

    Raises:
        PlanError: the file is not usable or was measured for other heads; or neither the folder ``cost_table`` nor the
            package has a table.
    """
    shape = attention_shape(config)
    heads = (shape.heads, shape.kv_heads, shape.head_dim)

    def find() -> TableCost | None:
        if cost_table and not Path(cost_table).is_dir():
            return open_table(cost_table, *heads, shape.value_dim)
        found = _table_of(sort, shape, cost_table)
        if found is None and cost_table:
            raise PlanError(
                f"Neither {cost_table} nor the package has a cost table for {sort}, {shape.heads} query heads and "
                f"{shape.kv_heads} key/value heads of {shape.head_dim}: measure one with `distca profile`, or leave "
                "`cost_table` out."
            )
        return found

    table = of_first_rank(find)
    if table is not None:
        return table
    count = area_cost if sort.kernel == "reference" else analytic_cost
    return count(*heads, value_bytes=shape.value_bytes, value_dim=shape.value_dim)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "cpu"


def _table_of(sort: ServerSort, shape: AttentionShape, cost_table: str | None, window: int = 0) -> TableCost | None:
    """Returns the table in the folder ``cost_table``, or else the package's table; None if neither has one."""
    find = partial(
        find_table, *sort, shape.heads, shape.kv_heads, shape.head_dim, window=window, value_dim=shape.value_dim
    )
    found = find(folder=Path(cost_table)) if cost_table and Path(cost_table).is_dir() else None
    return find() if found is None else found


def _cost_of(kind: AttentionKind, cost: CostModel, sort: ServerSort, cost_table: str | None) -> CostModel:
    """Returns the object that gives the seconds of tasks in layers of one kind.

    If the kind has a window, ``cost`` is a table and a table for the window exists, the object is that table. Otherwise
    it is derived from ``cost``."""
    if kind.window and isinstance(cost, TableCost):
        table = of_first_rank(lambda: _table_of(sort, cost.shape, cost_table, kind.window))
        if table is not None:
            table.linear = cost.linear
            return table
    return cost_of_kind(kind, cost)


def _costs_on(
    sort: ServerSort, kinds: Sequence[AttentionKind], cost: CostModel, cost_table: str | None
) -> tuple[CostModel, ...] | None:
    """Returns a cost model for each kind of layer, on servers of the sort ``sort``.

    The result is None if there is no table for the sort; if ``cost``, which is the first server's, is no table; or if
    ``cost_table`` is a file, which holds for all servers.
    """
    if not isinstance(cost, TableCost):
        return None

    def find() -> TableCost | None:
        is_file = bool(cost_table) and not Path(cost_table or "").is_dir()
        return None if is_file else _table_of(sort, cost.shape, cost_table)

    table = of_first_rank(find)
    return None if table is None else tuple(_cost_of(kind, table, sort, cost_table) for kind in kinds)


def _non_attention(
    config: TransformerConfig,
    cost: CostModel,
    level: Level,
    auto_is_time: bool,
    works: Callable[[], Sequence[LayerWork]],
) -> NonAttention | None:
    """Returns the seconds that linear layers take for a row (a token's hidden state).

    The result is None if plans make only attention's seconds equal on all servers.

    Args:
        cost: the seconds of attention tasks; ``cost.linear`` has the seconds of linear layers, or is None.
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
                "Plans make only attention's seconds equal, as the cost table has no seconds of linear layers; `distca "
                "profile` measures them."
            )
            return None
        raise PlanError(
            "level is time, but no cost table of this device and kernel has seconds of linear layers: measure one with "
            "`distca profile`, or set level to attention."
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
