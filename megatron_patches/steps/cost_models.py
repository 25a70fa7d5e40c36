"""Finds the cost models of a model's layers: how long core attention takes on a server, for the planner.

A *server* is a rank, or a process without a model, that computes attention. A *cost table* has measured seconds;
``distca profile`` measures it for a GPU model, a kernel and a shape of heads. Servers of one *sort* have the same GPU
model and kernel. Layers of one *kind* have the same window, softmax scale, softcap and sinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

from distca.cluster.agreement import of_first_rank
from distca.errors import PlanError
from distca.plan import AttentionKind, AttentionShape, CostModel, TableCost, analytic_cost, area_cost
from distca.plan.cost.analytic import cost_of_kind
from distca.plan.cost.table_file import find_table, open_table
from megatron_patches.model.latent import is_latent, latent_dims
from megatron_patches.steps.unlike_servers import ServerSort


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
    """Returns the cost model for the heads of one tensor-parallel rank; all ranks call it together.

    If ``cost_table`` is a file, the result is the file's table. Otherwise the result is a table for ``sort`` and these
    heads, from the folder ``cost_table`` or else from the package. If ``cost_table`` is None and the package has no
    table, the result is a formula. For the kernel "reference" this formula is proportional to the number of pairs of a
    query and a key that the query sees.

    Raises:
        PlanError: the file is not usable or was measured for other heads; or neither the folder ``cost_table`` nor the
            package has a table.
    """
    shape = attention_shape(config)
    heads = (shape.heads, shape.kv_heads, shape.head_dim)

    def find() -> TableCost | None:
        if cost_table and not Path(cost_table).is_dir():
            return open_table(cost_table, *heads, shape.value_dim, shape.value_bytes)
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


def _table_of(sort: ServerSort, shape: AttentionShape, cost_table: str | None, window: int = 0) -> TableCost | None:
    """Returns the table in the folder ``cost_table``, or else the package's table; None if neither has one."""
    heads = (shape.heads, shape.kv_heads, shape.head_dim)
    find = partial(find_table, *sort, *heads, window=window, value_dim=shape.value_dim, value_bytes=shape.value_bytes)
    found = find(folder=Path(cost_table)) if cost_table and Path(cost_table).is_dir() else None
    return find() if found is None else found


def cost_of(kind: AttentionKind, cost: CostModel, sort: ServerSort, cost_table: str | None) -> CostModel:
    """Returns the cost model of one kind of layer; all ranks call it together.

    If the kind has a window and ``cost`` is a table, a table for this window is looked for: in the folder
    ``cost_table``, then in the package. Without one the result is derived from ``cost``."""
    if kind.window and isinstance(cost, TableCost):
        table = of_first_rank(lambda: _table_of(sort, cost.shape, cost_table, kind.window))
        if table is not None:
            table.linear = cost.linear
            return table
    return cost_of_kind(kind, cost)


def costs_on(
    sort: ServerSort, kinds: Sequence[AttentionKind], cost: CostModel, cost_table: str | None
) -> tuple[CostModel, ...] | None:
    """Returns each kind's cost model on servers of ``sort``; all ranks call it together.

    The result is None if there is no table for the sort; if ``cost``, which is the first server's, is no table; or if
    ``cost_table`` is a file, which holds for all servers.
    """
    if not isinstance(cost, TableCost):
        return None

    def find() -> TableCost | None:
        is_file = bool(cost_table) and not Path(cost_table or "").is_dir()
        return None if is_file else _table_of(sort, cost.shape, cost_table)

    table = of_first_rank(find)
    return None if table is None else tuple(cost_of(kind, table, sort, cost_table) for kind in kinds)
