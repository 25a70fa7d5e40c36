"""Hold the same-phase pipeline against unmodified megatron-core on one rank."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from distca.attention import Kernel
from distca.plan import Layout, Plan, lay_out
from distca.plan.cost.analytic import area_cost
from distca.plan.cost.model import Direction
from distca.plan.pipeline import Schedule, StageLayers, plan_phases
from distca.plan.scheduler.scheduler import schedule
from distca.runtime import AttentionPool
from distca.runtime.timeline import Timeline
from distca.testing.plans import random_plan
from distca.transport import choose_transport
from megatron_patches.batch_context import DisaggregatedMicroBatch
from megatron_patches.groups import initialize_model_parallel, server_pool_group
from megatron_patches.parity.harness import (
    Outcome,
    ParityCase,
    RandomDocuments,
    build,
    gather_shares,
    rows_of,
    to_device_batch,
)
from megatron_patches.parity.weights import load_full_weights
from megatron_patches.pipeline_schedule import StageRoutes, run_ticks
from megatron_patches.training_step import wrap_for_data_parallel


def run_pipelined(
    case: ParityCase,
    dtype: torch.dtype,
    device: torch.device,
    kernel: Kernel,
    weights: dict[str, torch.Tensor],
    pp: int,
) -> Outcome:
    """The candidate with ``pp`` stages; every rank calls it and gets the same outcome (document losses are empty)."""
    initialize_model_parallel(case.tp, pp, case.seed)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    rank = parallel_state.get_data_parallel_rank()
    pool = AttentionPool(choose_transport("auto", server_pool_group()), kernel, Timeline(device), "resend")
    gpt = build(case, dtype, "disaggregated", pool=pool).to(device)
    layers = _stage_layers(case, pp)
    first = stage * layers.most
    global_name = partial(_global_name, first=first, tied=case.tie_embeddings and stage == pp - 1)
    load_full_weights(
        gpt,
        {name: weights[global_name(name)] for name, _ in gpt.named_parameters()},
        parallel_state.get_tensor_model_parallel_rank(),
    )
    model = wrap_for_data_parallel(gpt, distributed_optimizer=False)
    documents = RandomDocuments(case)
    layouts = [
        lay_out(
            micro_batch.lengths,
            parallel_state.get_data_parallel_world_size(),
            nano_batches=2 if case.ping_pong else 1,
            align=case.tp,
        )
        for micro_batch in documents.micro_batches
    ]
    plan = plan_phases(layouts, pp, layers, _scheduler(case, "forward"), _scheduler(case, "backward"))
    routes = StageRoutes.of(plan, stage, rank, device)
    batches = []
    for micro_batch, layout, busy in zip(documents.micro_batches, layouts, routes.busy, strict=True):
        rows = rows_of(case, documents, micro_batch, layout, rank)
        batches.append(to_device_batch(rows, DisaggregatedMicroBatch(busy, rows.nano_rows, case.tp), device))
    total, tokens = run_ticks(model, batches, plan, routes, pool)
    gradients = {
        global_name(name): gather_shares(name, p.main_grad, weights[global_name(name)].shape)
        for name, p in gpt.named_parameters()
    }
    return Outcome((total / tokens).item(), _of_all_stages(gradients, pp), [])


def _scheduler(case: ParityCase, direction: Direction) -> Schedule:
    if case.scheduler == "random":
        offset = 0 if direction == "forward" else 50

        return lambda layout, busy, serves: random_plan(layout, case.seed * 1000 + offset + layout.tokens)
    shape = case.shape
    cost = area_cost(shape.heads // case.tp, shape.kv_heads // case.tp, shape.resolved_head_dim)

    def scheduled(layout: Layout, busy: tuple[bool, ...], serves: tuple[bool, ...]) -> Plan:
        speeds = np.repeat(np.array(serves, np.float64), layout.ranks // len(serves))
        return schedule(layout, cost=cost, direction=direction, resend=True, speeds=speeds)

    return scheduled


def _stage_layers(case: ParityCase, pp: int) -> StageLayers:
    """While the last stage computes the output layer, one layer of the others passes in forward and two in backward."""
    last = case.last_stage_layers
    if last is None:
        return StageLayers(case.shape.layers // pp, case.shape.layers // pp)
    most = (case.shape.layers - last) // (pp - 1)
    return StageLayers(most, last, min(1, most - last), min(2, most - last))


def _global_name(name: str, first: int, tied: bool) -> str:
    """A parameter's name in the model without pipeline stages."""
    if tied and name == "output_layer.weight":
        return "embedding.word_embeddings.weight"
    return re.sub(r"decoder\.layers\.(\d+)", lambda match: f"decoder.layers.{int(match[1]) + first}", name)


def _of_all_stages(gradients: dict[str, torch.Tensor], pp: int) -> dict[str, torch.Tensor]:
    everyone: list[Any] = [None] * pp
    dist.all_gather_object(everyone, gradients, group=parallel_state.get_pipeline_model_parallel_group())
    return {name: gradient for stage in everyone for name, gradient in stage.items()}
