"""The request of a run, as benchmark.json has it; a prediction is made from the same."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.throughput.settings import Settings
from distca.train.config.schema import RunConfig


def described(settings: Settings, world_size: int) -> dict[str, Any]:
    """All that a run of ``world_size`` ranks depends on, but for the machine, its links and the workloads."""
    return {
        "warm_up": settings.warm_up,
        "batches": settings.batches,
        "link_channels": settings.link_channels,
        "socket_nodes": settings.socket_nodes,
        "short_warm_up": settings.short_warm_up,
        "seed": settings.seed,
        **config_described(settings.config, world_size),
    }


def config_described(config: RunConfig, world_size: int) -> dict[str, Any]:
    """The settings of a run that a step of ``world_size`` ranks depends on."""
    parallel, cad, train = config.parallel, config.cad, config.train
    return {
        "deal": True,  # older reports have runs without
        "tolerance": cad.tolerance,
        "ping_pong": cad.ping_pong,
        "model": asdict(config.model),
        "parallel": {
            "tp": parallel.tp,
            "pp": parallel.pp,
            "ep": parallel.ep,
            "data_parallel_times_cp": parallel.data_parallel(world_size),
        },
        "tokens_per_rank": config.data.tokens_per_rank,
        "micro_batches": train.micro_batches,
        "recompute": config.resolved_recompute,
        "linears": train.linears,
        "fp8": train.fp8,
        "fp8_weights": train.fp8_weights,
        "gradients": train.gradients,
        "moments": train.moments,
    }
