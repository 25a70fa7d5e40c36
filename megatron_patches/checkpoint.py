"""Sharded checkpoints by megatron's dist_checkpointing: model, optimizer, schedule, and what the loop adds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
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
        extra: anything else that every rank has alike; its "step" is the number of optimizer steps done.
    """
    state = _sharded_state(model, optimizer, is_loading=False)
    state["extra"] = extra
    dist_checkpointing.save(state, str(path), content_metadata=_metadata())


def load_checkpoint(path: Path, model: DistributedDataParallel, optimizer: OptimizerAndSchedule) -> dict[str, Any]:
    """Restore what :func:`save_checkpoint` wrote; returns its ``extra``."""
    _allocate_state(optimizer.optimizer)
    settings = [_settings_of(group) for group in optimizer.optimizer.param_groups]
    with torch.no_grad():  # megatron copies into float32 weights themselves
        state = dist_checkpointing.load(_sharded_state(model, optimizer, is_loading=True), str(path))
        unwrap_model(model).load_state_dict(state["model"])
        optimizer.optimizer.load_state_dict(state["optimizer"])
        for group, own in zip(optimizer.optimizer.param_groups, settings, strict=True):
            group.update(own)
        optimizer.schedule.load_state_dict(state["schedule"])
    extra: dict[str, Any] = state["extra"]
    _restore_step(optimizer.optimizer, extra["step"])
    return extra


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """What the configuration decides of a parameter group: a resumed run follows its own, not the checkpoint's."""
    return {name: group[name] for name in ("max_lr", "min_lr", "betas", "eps") if name in group}


def _adams(optimizer: Any) -> Iterator[Any]:
    """torch's Adam optimizers inside megatron's; Apex's and Transformer Engine's need none of the help below."""
    if hasattr(optimizer, "chained_optimizers"):
        for part in optimizer.chained_optimizers:
            yield from _adams(part)
    elif isinstance(optimizer.optimizer, torch.optim.Adam | torch.optim.AdamW):
        yield optimizer.optimizer


def _allocate_state(optimizer: Any) -> None:
    """Give every weight an Adam state to load into.

    torch's Adam makes it at the first step, and megatron's distributed optimizer (0.16.1) cannot load without it: it
    reads the number of steps from the state.
    """
    for adam in _adams(optimizer):
        for group in adam.param_groups:
            for weight in group["params"]:
                if not adam.state[weight]:
                    moments = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
                    adam.state[weight] = {"step": torch.tensor(0.0)} | moments


def _restore_step(optimizer: Any, step: int) -> None:
    """Set the number of steps that Adam corrects its moments by.

    megatron's distributed optimizer (0.16.1) gives all weights one common tensor for it, which every weight's update
    would then count up, and leaves the value from before the load in it.
    """
    for adam in _adams(optimizer):
        for state in adam.state.values():
            state["step"] = torch.tensor(float(step))


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
