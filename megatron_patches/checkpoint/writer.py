"""Writes the tensors of a checkpoint with torch's own writer, in the format that Megatron's loader reads.

Megatron's writer forks processes, and a process that uses a GPU cannot be forked safely.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed import checkpoint

from megatron_patches.checkpoint.staging import HostStaging


class TorchWriter:
    """A save strategy for Megatron's dist_checkpointing, with the format ``torch_dist``, version 1.

    Callers must wrap it in a ``FullyParallelSaveStrategyWrapper``: Megatron silently replaces other strategies.

    Args:
        staging: host memory for copies of tensors, which :meth:`write` writes later; with None, :meth:`save` writes.
    """

    backend, version = "torch_dist", 1
    can_handle_sharded_objects = True
    """Older versions of Megatron read this. It says that the strategy also writes objects that are not tensors."""

    def __init__(self, staging: HostStaging | None = None) -> None:
        self._staging = staging
        self._later: tuple[dict[str, Any], str | Path] | None = None

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Copies this rank's tensors to ``staging``, for :meth:`write`. All ranks call this method together.

        Without ``staging``, or if a node has too little host memory, it copies nothing and writes the tensors at once.

        Args:
            sharded_state_dict: Megatron's ``ShardedTensor`` and ``ShardedObject`` values, in nested dictionaries.
            checkpoint_dir: an existing folder.

        Raises:
            CheckpointException: on all ranks, if any rank could not write.
        """
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        staging = self._staging
        if staging is not None:
            tensors = [each for shards in by_key.values() for each in shards if isinstance(each, ShardedTensor)]
            if not staging.copy(tensors):
                staging = None
        self._later = (mcore_to_pyt_state_dict(by_key, is_loading=False), checkpoint_dir)
        if staging is None:
            self.write()

    def write(self) -> None:
        """Writes what :meth:`save` left to write, if anything. All ranks call it together; it may run in a thread.

        Raises:
            CheckpointException: on all ranks, if any rank could not write.
        """
        if self._later is None:
            return
        (state, folder), self._later = self._later, None
        if self._staging is not None:
            self._staging.wait()
        with torch.no_grad():
            checkpoint.save(
                state,
                storage_writer=checkpoint.FileSystemWriter(folder),
                planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
                process_group=None if self._staging is None else self._staging.group,
            )
