"""Writes the tensors of a checkpoint with torch's own writer, in the format that megatron's loader reads.

megatron's writer starts a process that imports the training script again, copies all tensors into pinned
memory at once, and writes them in forked processes. A process that uses a GPU should not be forked, and where such a
child dies the training waits for it for ever. Here nothing is forked: this process copies one tensor after the other
and writes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed import checkpoint


class TorchWriter:
    """megatron's ``torch_dist`` format, version 1.

    To be wrapped in a ``FullyParallelSaveStrategyWrapper``: in place of a strategy of any other class newer versions of
    megatron silently take their own.
    """

    backend, version = "torch_dist", 1
    can_handle_sharded_objects = True
    """Earlier versions of megatron ask for it; objects are written beside the tensors."""

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Write this rank's tensors and objects; every rank calls it, and all are written when it returns.

        Raises:
            CheckpointException: on every rank, if one could not write.
        """
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        checkpoint.save(
            mcore_to_pyt_state_dict(by_key, is_loading=False),
            storage_writer=checkpoint.FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
