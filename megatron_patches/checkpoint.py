"""Sharded checkpoints by megatron's dist_checkpointing: model, optimizer, schedule, and what the loop adds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model

from megatron_patches.optimizer import OptimizerAndSchedule


def save_checkpoint(
    path: Path, model: DistributedDataParallel, optimizer: OptimizerAndSchedule, extra: dict[str, Any]
) -> None:
    """Write a checkpoint; every rank calls it and it returns when this rank's share is written.

    Args:
        path: an existing empty folder.
        model: the wrapped model.
        optimizer: its optimizer and schedule.
        extra: anything else that every rank has alike.
    """
    state = _sharded_state(model, optimizer, is_loading=False)
    state["extra"] = extra
    dist_checkpointing.save(state, str(path), content_metadata=_metadata())


def load_checkpoint(path: Path, model: DistributedDataParallel, optimizer: OptimizerAndSchedule) -> dict[str, Any]:
    """Restore what :func:`save_checkpoint` wrote; returns its ``extra``."""
    state = dist_checkpointing.load(_sharded_state(model, optimizer, is_loading=True), str(path))
    unwrap_model(model).load_state_dict(state["model"])
    optimizer.optimizer.load_state_dict(state["optimizer"])
    optimizer.schedule.load_state_dict(state["schedule"])
    extra: dict[str, Any] = state["extra"]
    return extra


def _metadata() -> dict[str, Any]:
    # torch's Adam keeps its state as megatron's data-parallel buffers do, which this format saves.
    return {
        "distrib_optim_sharding_type": "dp_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _sharded_state(model: DistributedDataParallel, optimizer: OptimizerAndSchedule, is_loading: bool) -> dict[str, Any]:
    metadata = _metadata()
    sharded_model = unwrap_model(model).sharded_state_dict(metadata=metadata)
    return {
        "model": sharded_model,
        "optimizer": optimizer.optimizer.sharded_state_dict(sharded_model, is_loading=is_loading, metadata=metadata),
        "schedule": optimizer.schedule.state_dict(),
    }
