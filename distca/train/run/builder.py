"""Everything a run trains with, built from its configuration."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from distca.cluster.topology import fullest_node
from distca.device.host_memory import free_host_memory
from distca.train.checkpoint.folders import load_initial_weights
from distca.train.config.schema import RunConfig
from distca.train.run.expert_nodes import machines_of_ranks, nodes_warning
from distca.train.run.memory import describe, predict_memory
from distca.train.run.memory_fit import (
    OUTSIDE_TORCH,
    HostMemory,
    check_host_memory,
    check_memory,
    receive_buffer,
    resolve,
)
from distca.words import count, format_bytes
from megatron_patches.ranks.world import World

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

    from megatron_patches.api import CAD
    from megatron_patches.training.optimizer import OptimizerAndSchedule

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
    # One hardware queue would start kernels in the order of their calls. So megatron-core's tensor-parallel collectives
    # in backward would begin before the matrix product that they should hide behind. But the streams of attention's
    # transfers, of the server and of the other nano-batch would be in that queue, too, and wait for each other.
    ("To guarantee overlapping TP and SP collectives", UserWarning),
    (r"When using .* it is recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS", UserWarning),
)


@dataclass(frozen=True)
class Trainer:
    """The parts of a run. ``model`` and ``optimizer`` are Megatron's, see megatron_patches."""

    config: RunConfig
    world: World
    cad: CAD
    model: DistributedDataParallel
    optimizer: OptimizerAndSchedule
    vocabulary: int

    @property
    def layers(self) -> int:
        """Layers of every pipeline stage that have attention."""
        return len(self.config.model.attention_kinds) // self.config.parallel.pp

    @property
    def receive_buffer_gib(self) -> float:
        """GiB of NVSHMEM's buffer on this rank; 0 where rows go another way."""
        return self.config.resolved_nvshmem_buffer_gb if self.cad.pool.transport.name == "nvshmem" else 0.0


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
    from megatron_patches.ranks.groups import initialize_model_parallel
    from megatron_patches.te.choice import check_moments
    from megatron_patches.training.optimizer import build_optimizer

    parallel, moments = config.parallel, getattr(torch, config.train.moments)
    check_moments(moments, world.device)
    config = _fitting(config, world, vocabulary)
    if config.model.experts.count and (said := nodes_warning(config, machines_of_ranks(config))) and world.rank == 0:
        logger.warning("%s", said)
    initialize_model_parallel(parallel.tp, parallel.pp, config.train.seed, parallel.ep)
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    cad, model = _model(config, world, vocabulary, dtype)
    steps, warmup, decay = config.train.steps, config.resolved_warmup_steps, config.resolved_decay_steps
    optimizer = build_optimizer(model, config.optimizer, steps, warmup, dtype, decay, moments)
    logger.info(
        "Model: %s parameters on this rank; %s, TP %d, PP %d%s; core attention %s; linear layers %s",
        f"{sum(p.numel() for p in model.parameters()):,}",
        count(parallel.data_parallel(world.size), "data-parallel rank"),
        parallel.tp,
        parallel.pp,
        _experts(config, vocabulary),
        "disaggregated" if config.cad.enabled else "not disaggregated",
        _described(cad, config),
    )
    return Trainer(config, world, cad, model, optimizer, vocabulary)


def _model(config: RunConfig, world: World, vocabulary: int, dtype: torch.dtype) -> tuple[CAD, DistributedDataParallel]:
    from distca import CAD
    from megatron_patches.model.gpt import build_model, transformer_config
    from megatron_patches.model.model_variant import cad_keywords
    from megatron_patches.patches.stage_timers import StageTimers
    from megatron_patches.ranks.groups import pipeline_seed

    parallel, on_gpu, settings = config.parallel, world.device.type == "cuda", config.cad
    torch.manual_seed(config.train.seed + pipeline_seed())
    model_config = transformer_config(
        config.model,
        dtype,
        sequence_parallel=parallel.sequence_parallel,
        recompute_mlp=config.train.recompute == "mlp",
        cpu_initialization=not on_gpu,
        fp8=config.train.fp8,
        fp8_weights=config.train.fp8_weights,
    )
    cad = CAD(
        model_config,
        tokens_per_rank=config.data.tokens_per_rank,
        disaggregate=settings.enabled,
        **settings.shared,
        recompute="all" if config.train.recompute == "all" else "none",
        keep_outputs=config.train.keep_outputs == "all",
        offload=config.train.offload == "all",
        linears=config.train.linears,
        **cad_keywords(config.model),
    )
    if world.health is not None:
        world.health.pool_has_formed()
    if parallel.pp > 1 and not settings.enabled:
        model_config.timers = StageTimers(cad.pool.timeline)
    gpt = cad.attach(build_model(config.model, vocabulary, cad))
    if on_gpu:
        gpt.cuda()
    if config.checkpoint.init_from and not config.checkpoint.resume:
        load_initial_weights(gpt, Path(config.checkpoint.init_from))
    gradients = getattr(torch, config.train.gradients)
    return cad, cad.data_parallel(gpt, distributed_optimizer=config.optimizer.distributed, gradients=gradients)


def _experts(config: RunConfig, vocabulary: int) -> str:
    """How many, and how many of the whole model's parameters a token uses."""
    model = config.model
    if not model.experts.count:
        return ""
    tables = (1 if model.tie_embeddings else 2) * vocabulary * model.hidden
    active, held = model.matmul_weights + tables, model.held_weights + tables
    return f", EP {config.parallel.ep} ({model.experts.count} experts; a token uses {active:,} of {held:,} parameters)"


def _described(cad: CAD, config: RunConfig) -> str:
    """Says whose linear layers are used, and how they compute."""
    whose = "Transformer Engine's" if cad.te_linears else "Megatron-Core's"
    if config.train.fp8 == "none":
        return whose
    held = "FP8 alone" if config.train.fp8_weights else "bfloat16"
    return f"{whose}, in FP8 with {config.train.fp8} scaling, their weights held in {held}"


def _fitting(config: RunConfig, world: World, vocabulary: int) -> RunConfig:
    """The run without auto in what memory decides. Says what every stage will need, and refuses what does not fit."""
    device, host = _smallest_device(world), HostMemory(*fullest_node(1, free_host_memory()))
    resolved = resolve(config, world.size, vocabulary, device, host)
    if config.train.recompute == "auto" and device is not None:
        taken = [f"train.recompute {resolved.train.recompute}", f"train.keep_outputs {resolved.train.keep_outputs}"]
        if config.cad.enabled:
            taken += [f"train.offload {resolved.train.offload}", f"cad.backward {resolved.cad.backward}"]
        logger.info("By predicted memory: %s", ", ".join(taken))
    for line in describe(predict_memory(resolved, world.size, vocabulary)):
        logger.info("%s", line)
    if device is not None:
        logger.info(
            "Beside it of %s: %s for rows that are received, about %s outside torch",
            *map(format_bytes, (device, receive_buffer(resolved, world.size), OUTSIDE_TORCH)),
        )
        check_memory(resolved, world.size, vocabulary, device, host)
    check_host_memory(resolved, world.size, vocabulary, host)
    return resolved


def _smallest_device(world: World) -> int | None:
    """Bytes of memory of the smallest GPU of all ranks, which decide alike; None on CPUs."""
    if world.device.type != "cuda":
        return None
    sizes: list[int] = [0] * world.size
    torch.distributed.all_gather_object(sizes, torch.cuda.get_device_properties(world.device).total_memory)
    return min(sizes)
