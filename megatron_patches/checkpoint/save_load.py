"""Saves and loads checkpoints of model, optimizer and learning-rate schedule, with Megatron's dist_checkpointing.

A checkpoint can be loaded with other numbers of tensor-parallel, pipeline and data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.metadata import Metadata

from distca.cluster.agreement import on_all_ranks
from distca.errors import ConfigError, VersionError
from megatron_patches.checkpoint.adam_state import inner_adams, set_step
from megatron_patches.checkpoint.optimizer_state import (
    distributed_parts,
    holds_weights,
    keep_parts,
    optimizer_parts,
    pieces,
    without_fp8,
)
from megatron_patches.checkpoint.staging import HostStaging
from megatron_patches.checkpoint.unpickling import check_small_files, readable
from megatron_patches.checkpoint.writer import TorchWriter
from megatron_patches.te.fp8_weights import has_fp8_weights, is_fp8, quantise_main_weights
from megatron_patches.training.optimizer import OptimizerAndSchedule, torch_adams
from megatron_patches.versions import installed_version


def save_checkpoint(
    path: Path,
    model: DistributedDataParallel,
    optimizer: OptimizerAndSchedule,
    extra: dict[str, Any],
    staging: HostStaging | None = None,
) -> Callable[[], None]:
    """Writes a checkpoint; all ranks call this function together.

    Args:
        path: an existing empty folder.
        extra: the caller's values, equal on all ranks; "step" is the number of optimizer steps done.
        staging: host memory to which tensors are copied. With None, or with too little memory, this function writes
            everything to the disk.

    Returns:
        A function that writes the copies to the disk, if there are any. Every rank calls the returned function once
        before the next checkpoint, perhaps in a thread while training goes on.
    """
    state = _sharded_state(model, optimizer, is_loading=False)
    state["extra"] = extra
    writer = TorchWriter(staging)
    # Of the data-parallel ranks with copies of a tensor, this wrapper chooses one to write it.
    parallel = FullyParallelSaveStrategyWrapper(writer, parallel_state.get_data_parallel_group())
    dist_checkpointing.save(state, str(path), parallel, content_metadata=_metadata())
    return writer.write


def load_checkpoint(path: Path, model: DistributedDataParallel, optimizer: OptimizerAndSchedule) -> dict[str, Any]:
    """Restores the state that :func:`save_checkpoint` wrote; returns its ``extra``.

    Raises:
        VersionError: the checkpoint needs a newer Megatron-Core.
        UnreadableError: a file is damaged, or contains more than data. No code in the file was run.
        ConfigError: a tensor of the model has another shape in the checkpoint, or is not there.
        SupportError: this rank found nothing wrong before loading, but another rank did.
    """
    _check_readable(path)
    _allocate_state(optimizer.optimizer)
    with torch.no_grad():  # Megatron copies into float32 weights in place, which autograd would refuse
        state = _read(_sharded_state(model, optimizer, is_loading=True), path)
        missing = unwrap_model(model).load_state_dict(state["model"], strict=not has_fp8_weights(model)).missing_keys
        assert all(is_fp8(unwrap_model(model).get_parameter(name)) for name in missing), missing
        _load_optimizer(optimizer.optimizer, state["optimizer"], state["extra"]["step"])
        optimizer.schedule.load_state_dict(state["schedule"])
        if missing:
            quantise_main_weights(model, distributed_parts(optimizer.optimizer))
        elif any(getattr(adam, "store_param_remainders", False) for adam in inner_adams(optimizer.optimizer)):
            # Loading has set this rank's range of the bfloat16 weights; other ranks send the rest.
            model.start_param_sync(force_sync=True)
    extra: dict[str, Any] = state["extra"]
    _restore_step(optimizer.optimizer, extra["step"])
    return extra


def _read(sharded: dict[str, Any], path: Path) -> dict[str, Any]:
    with readable():
        on_all_ranks(partial(_check_files, sharded["model"], path))
        state: dict[str, Any] = dist_checkpointing.load(sharded, str(path))
        return state


def _check_files(model: dict[str, Any], path: Path) -> None:
    metadata = check_small_files(path)  # torch would log long traces for a damaged file
    _check_shapes(model, metadata, path)


def _check_shapes(model: dict[str, Any], metadata: Metadata, path: Path) -> None:
    """Compares shapes in a model's ``sharded_state_dict`` and a checkpoint. Megatron's error would suggest damage.

    Raises:
        ConfigError: a tensor's shape differs, or the checkpoint does not have the tensor.
    """
    weights = (each for each in nested_values(model) if isinstance(each, ShardedTensor | ShardedTensorFactory))
    for tensor in (piece for weight in weights for piece in pieces(weight)):
        if tensor.allow_shape_mismatch:
            continue
        saved = getattr(metadata.state_dict_metadata.get(tensor.key), "size", None)
        if saved is None or tuple(saved) != tuple(tensor.global_shape):
            has = f"shape {list(saved)}" if saved is not None else "no such tensor"
            raise ConfigError(
                f"{path} does not fit this run: it has {has} for {tensor.key}, and the model needs shape "
                f"{list(tensor.global_shape)}. Restore the model's settings, or start without this checkpoint."
            )


def _check_readable(path: Path) -> None:
    # Only older versions of Megatron-Core need the file common.pt, and only these have the module strategies.base.
    older = find_spec("megatron.core.dist_checkpointing.strategies.base") is not None
    if older and not (path / "common.pt").exists():
        raise VersionError(
            f"{path} was saved with a newer megatron-core than {installed_version()}. The installed version cannot "
            "read it: install the newer one."
        )


def _load_optimizer(optimizer: Any, loaded: dict[Any, Any], step: int) -> None:
    """Loads each weight's state into an optimizer, and keeps the optimizer's own parameter groups.

    The checkpoint has the first rank's parameter groups, which do not fit other pipeline stages.
    """
    parts = optimizer_parts(optimizer)
    states = [loaded] if len(parts) == 1 else [loaded.get(number, {}) for number in range(len(parts))]
    for part, state in zip(parts, states, strict=True):
        if not holds_weights(part):
            continue
        own = part.state_dict()
        if isinstance(part, DistributedOptimizer):
            kind = {"param_state_sharding_type": _metadata()["distrib_optim_sharding_type"]}
            part.load_state_dict(own | {"param_state": state["param_state"]} | kind)
            continue
        # A float32 optimizer's state is Adam's state. A mixed-precision optimizer has Adam's state under "optimizer".
        inner, own = (state, own) if "param_groups" in own else (state.setdefault("optimizer", {}), own["optimizer"])
        inner["param_groups"] = own["param_groups"]
        numbers = inner.setdefault("state", {})
        if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
            # Megatron requires this entry for torch's Adam. A checkpoint of another Adam lacks it.
            numbers.setdefault("common_step", torch.tensor(float(step)))
        part.load_state_dict(state)


def _allocate_state(optimizer: Any) -> None:
    """Gives every weight of torch's Adam a state to load into; Adam itself would make it at the first step."""
    for adam in torch_adams(optimizer):
        for group in adam.param_groups:
            for weight in group["params"]:
                if not adam.state[weight]:
                    moments = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
                    adam.state[weight] = {"step": torch.tensor(0.0, device=weight.device)} | moments


def _restore_step(optimizer: Any, step: int) -> None:
    """Sets Adam's number of steps done for each weight.

    Megatron 0.16.1 makes all weights of torch's Adam share one tensor of this number, and each step would add 1 to it
    for every weight.
    """
    for adam in inner_adams(optimizer):
        set_step(adam, step)


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _sharded_state(model: DistributedDataParallel, optimizer: OptimizerAndSchedule, is_loading: bool) -> dict[str, Any]:
    keep_parts(optimizer.optimizer)
    metadata = _metadata()
    sharded_model = unwrap_model(model).sharded_state_dict(metadata=metadata)
    return {
        "model": without_fp8(optimizer.optimizer, sharded_model, is_loading),
        "optimizer": optimizer.optimizer.sharded_state_dict(sharded_model, is_loading=is_loading, metadata=metadata),
        "schedule": optimizer.schedule.state_dict(),
    }
