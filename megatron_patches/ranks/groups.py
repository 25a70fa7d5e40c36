"""megatron's process groups, and the group of the server pool."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from distca.cluster.timeout import TIMEOUT
from megatron_patches.support.experts import check_expert_groups
from megatron_patches.te import quantization


def initialize_model_parallel(tp: int, pp: int, seed: int, ep: int = 1) -> None:
    """Creates megatron's groups and seeds its random states; torch.distributed must be initialised already.

    Each rank has whole experts, also with tensor parallelism. Groups of these sizes that exist are kept. Groups of
    other sizes are destroyed first: megatron's own clean-up forgets groups without closing them, and each holds threads
    and connections.
    """
    if parallel_state.model_parallel_is_initialized():
        sizes = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
        )
        if sizes == (tp, pp, ep):
            model_parallel_cuda_manual_seed(seed + pipeline_seed(), force_reset_rng=True)
            return
        destroy_model_parallel()
    check_expert_groups(dist.get_world_size() // pp, ep)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=int(TIMEOUT.total_seconds() / 60),
    )
    for group in dist.distributed_c10d._world.pg_map:  # megatron (0.16.1) gives not all of them the time-out
        if group is not dist.group.WORLD:
            dist.distributed_c10d._set_pg_timeout(TIMEOUT, group)
    if pp > 1:
        # In NCCL, some ranks of a group can exchange only after all of its ranks have exchanged once.
        here = torch.zeros(1, device=torch.cuda.current_device())
        dist.all_reduce(here, group=parallel_state.get_pipeline_model_parallel_group())
    model_parallel_cuda_manual_seed(seed + pipeline_seed())


def pipeline_seed() -> int:
    """Returns the number that a stage adds to the seed of its weights, so that no two stages draw the same ones."""
    return 100 * parallel_state.get_pipeline_model_parallel_rank()


_pools: dict[tuple[int, int], dist.ProcessGroup] = {}


def server_pool_group() -> dist.ProcessGroup:
    """Returns the group of all data-parallel and pipeline ranks that share this rank's tensor-parallel rank, numbered
    stage by stage. Without pipeline stages these are the data-parallel ranks. All ranks call it together."""
    tp, pp = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    if pp == 1:
        return parallel_state.get_data_parallel_group()
    if _pools.get((tp, pp)) not in dist.distributed_c10d._world.pg_map:  # none yet, or closed with its world
        # megatron numbers tensor-parallel ranks fastest, then data-parallel ones, then stages.
        for first in range(tp):
            ranks = list(range(first, dist.get_world_size(), tp))
            group = dist.new_group(ranks, timeout=TIMEOUT)
            if dist.get_rank() in ranks:
                _pools[tp, pp] = group
    return _pools[tp, pp]


def destroy_model_parallel() -> None:
    """Closes megatron's groups and forgets them; the default group stays."""
    quantization.forget_layers()
    parallel_state.destroy_model_parallel()
    _pools.clear()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
