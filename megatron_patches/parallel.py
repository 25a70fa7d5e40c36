"""megatron's process groups, and the server pool among them."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed


def initialize_model_parallel(tp: int, pp: int, seed: int) -> None:
    """Create megatron's groups and seed its random states; torch.distributed is initialised already."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    model_parallel_cuda_manual_seed(seed)


def server_pool_group() -> dist.ProcessGroup:
    """All data-parallel × pipeline ranks that share this rank's tensor-parallel rank; without pipeline stages these are
    the data-parallel ranks."""
    assert parallel_state.get_pipeline_model_parallel_world_size() == 1
    return parallel_state.get_data_parallel_group()
