"""Everything a run trains with, built from its configuration."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from distca.attention import Kernel, choose_kernel
from distca.attention.warm_up import warm_up
from distca.cluster.topology import pool_links
from distca.plan import training_tolerance
from distca.plan.cost.analytic import analytic_cost, area_cost
from distca.plan.cost.model import CostModel
from distca.plan.cost.table_file import find_table
from distca.runtime import AttentionPool
from distca.runtime.timeline import Timeline
from distca.train.config.schema import RunConfig
from distca.train.data.plan_options import Planning
from distca.train.run.linear_cost import beside_attention
from distca.train.run.memory import check_memory, describe, predict_memory
from distca.train.run.stage_layers import stage_layers
from distca.transport import choose_transport
from distca.words import count
from megatron_patches.world import World

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

logger = logging.getLogger(__name__)

# Every rank would say these, and a user can do nothing about them.
_REPEATED_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    # torch renames collectives and checkpoint functions faster than megatron-core follows.
    ("`torch.distributed", FutureWarning),
    ("`load_state_dict` is deprecated", FutureWarning),
    ("Please use DTensor instead", FutureWarning),
    # What all ranks have alike of a checkpoint, newer versions of megatron-core read on each rank by itself.
    ("torch.distributed is disabled, unavailable or uninitialized", UserWarning),
    ("The argument order of load has been changed", UserWarning),
    # One hardware queue would start kernels in the order of their calls, so that megatron-core's tensor-parallel
    # collectives in backward begin before the matrix product they should hide behind. It would also put the streams of
    # attention's transfers, the server and the other half into that one queue, where each waits for the others.
    (r"When using .* it is recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS", UserWarning),
)


@dataclass(frozen=True)
class Trainer:
    """The parts of a run. ``model``, ``optimizer`` are megatron's, see megatron_patches."""

    config: RunConfig
    world: World
    model: object
    optimizer: object
    pool: AttentionPool
    planning: Planning
    vocabulary: int


def build_trainer(config: RunConfig, world: World, vocabulary: int) -> Trainer:
    """Create process groups, model, optimizer and server pool. Every rank calls it together.

    Args:
        config: a validated configuration.
        world: this process's place.
        vocabulary: token ids of the data; the model may have more rows.
    """
    with warnings.catch_warnings():
        # megatron-core says once per module that Transformer Engine or Apex are missing; `distca doctor` says it once.
        warnings.simplefilter("ignore")
        trainer = _build(config, world, config.model.vocabulary or vocabulary)
    for message, category in _REPEATED_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)
    return trainer


def _build(config: RunConfig, world: World, vocabulary: int) -> Trainer:
    from megatron_patches.groups import initialize_model_parallel
    from megatron_patches.optimizer import build_optimizer

    parallel = config.parallel
    _check_memory(config, world, vocabulary)
    initialize_model_parallel(parallel.tp, parallel.pp, config.train.seed)
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    pool = _pool(config, world, dtype)
    planning = _planning(config, world, vocabulary, dtype, pool)
    model = _model(config, world, vocabulary, dtype, pool)
    optimizer = build_optimizer(model, config.optimizer, config.train.steps, config.resolved_warmup_steps, dtype)
    logger.info(
        "Model: %s parameters on this rank; %s, TP %d, PP %d; core attention %s",
        f"{sum(p.numel() for p in model.parameters()):,}",
        count(parallel.data_parallel(world.size), "data-parallel rank"),
        parallel.tp,
        parallel.pp,
        "disaggregated" if config.cad.enabled else "not disaggregated",
    )
    return Trainer(config, world, model, optimizer, pool, planning, vocabulary)


def _pool(config: RunConfig, world: World, dtype: torch.dtype) -> AttentionPool:
    from megatron_patches.groups import server_pool_group

    model, tp = config.model, config.parallel.tp
    kernel = choose_kernel(
        config.cad.kernel,
        device=world.device,
        dtype=dtype,
        head_dim=model.resolved_head_dim,
        deterministic=config.cad.deterministic,
    )
    if world.device.type == "cuda":
        warm_up(kernel, model.heads // tp, model.kv_heads // tp, model.resolved_head_dim, dtype, world.device)
    transport = choose_transport(config.cad.transport, server_pool_group(), config.resolved_nvshmem_buffer_gb)
    return AttentionPool(transport, kernel, Timeline(world.device), config.resolved_backward)


def _model(
    config: RunConfig, world: World, vocabulary: int, dtype: torch.dtype, pool: AttentionPool
) -> DistributedDataParallel:
    from megatron_patches.groups import pipeline_seed
    from megatron_patches.model import build_model, transformer_config
    from megatron_patches.patches.stage_timers import StageTimers
    from megatron_patches.training_step import wrap_for_data_parallel

    parallel, on_gpu = config.parallel, world.device.type == "cuda"
    layers = stage_layers(config, vocabulary)
    torch.manual_seed(config.train.seed + pipeline_seed())
    model_config = transformer_config(
        config.model,
        dtype,
        sequence_parallel=parallel.sequence_parallel,
        recompute_mlp=config.train.recompute == "mlp",
        cpu_initialization=not on_gpu,
        accumulate_in_products=True,
        last_stage_layers=layers.last if layers.last < layers.most else None,
    )
    if parallel.pp > 1 and not config.cad.enabled:
        model_config.timers = StageTimers(pool.timeline)
    gpt = build_model(
        config.model,
        vocabulary,
        model_config,
        "disaggregated" if config.cad.enabled else "packed",
        pool=pool,
        kernel=pool.kernel,
        timeline=pool.timeline,
        recompute_segments=config.train.recompute == "all",
    )
    if on_gpu:
        gpt.cuda()
    return wrap_for_data_parallel(gpt, config.optimizer.distributed)


def _planning(config: RunConfig, world: World, vocabulary: int, dtype: torch.dtype, pool: AttentionPool) -> Planning:
    parallel, rank, tolerance = config.parallel, pool.transport.rank, config.cad.tolerance
    data_parallel = parallel.data_parallel(world.size)
    cost = _cost(config, pool.kernel, dtype, world.device)
    return Planning(
        rank=rank % data_parallel,
        ranks=data_parallel,
        stage=rank // data_parallel,
        stages=parallel.pp,
        layers=stage_layers(config, vocabulary),
        cost=cost,
        disaggregate=config.cad.enabled,
        nano_batches=2 if config.cad.enabled and config.cad.ping_pong else 1,
        resend=config.cad.enabled and config.resolved_backward == "resend",
        tolerance=training_tolerance(pool.transport.ranks) if tolerance is None else tolerance,
        chunks=parallel.tp if parallel.sequence_parallel else 1,
        device=world.device,
        links=pool_links(parallel.tp),
        beside=beside_attention(config, cost, world.device.type == "cuda"),
    )


def _check_memory(config: RunConfig, world: World, vocabulary: int) -> None:
    """Say what every stage will need, and refuse what clearly does not fit."""
    stages = predict_memory(config, world.size, vocabulary)
    for line in describe(stages):
        logger.info("%s", line)
    if world.device.type == "cuda":
        heap = 0.0
        if config.cad.enabled and config.cad.transport in ("auto", "nvshmem") and world.size > config.parallel.tp:
            heap = config.resolved_nvshmem_buffer_gb * 2**30
        check_memory(config, stages, torch.cuda.get_device_properties(world.device).total_memory - int(heap))


def _cost(config: RunConfig, kernel: Kernel, dtype: torch.dtype, device: torch.device) -> CostModel:
    """Seconds per CA-task for the planner, for the heads of one tensor-parallel rank."""
    model, tp = config.model, config.parallel.tp
    heads = (model.heads // tp, model.kv_heads // tp, model.resolved_head_dim)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    # All ranks must plan the same, so all plan with the first one's table, whatever files or GPUs the others have.
    measured = [find_table(name, kernel.name, *heads)]
    dist.broadcast_object_list(measured)
    if measured[0] is not None:
        return measured[0]
    if kernel.name == "reference":
        return area_cost(*heads)
    return analytic_cost(*heads, value_bytes=dtype.itemsize)
