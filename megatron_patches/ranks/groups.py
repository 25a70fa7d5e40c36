"""Makes and closes Megatron's process groups, and the groups of the server pools.

A server pool is a set of ranks that compute each other's core attention: the ranks of all pipeline stages with the same
tensor-parallel rank, and so with the same attention heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from distca.cluster.interface import bind_gloo
from distca.cluster.timeout import TIMEOUT
from megatron_patches.patches.cpu import use_cpu
from megatron_patches.support.experts import check_expert_groups
from megatron_patches.te import quantization


def initialize_model_parallel(tp: int, pp: int, seed: int, ep: int = 1) -> None:
    """Creates Megatron's process groups and seeds its random states; torch.distributed must be initialised.

    Groups that exist already are kept if they have these sizes; otherwise they are closed and made anew.

    Args:
        tp: number of tensor-parallel ranks.
        pp: number of pipeline stages.
        seed: seed of weights and dropout; each stage adds :func:`pipeline_seed`.
        ep: number of expert-parallel ranks.

    Raises:
        SupportError: ``ep`` does not divide the number of ranks of a stage. Groups that exist are kept.
    """
    check_expert_groups(dist.get_world_size() // pp, ep)
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
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=int(TIMEOUT.total_seconds() / 60),
    )
    for group in dist.distributed_c10d._world.pg_map:  # Megatron 0.16.1 sets the timeout of some groups only
        if group is not dist.group.WORLD:
            dist.distributed_c10d._set_pg_timeout(TIMEOUT, group)
    if pp > 1:
        # With NCCL, a group's first operation must be a collective of all its ranks, not a send between two stages.
        here = torch.zeros(1, device=torch.cuda.current_device())
        dist.all_reduce(here, group=parallel_state.get_pipeline_model_parallel_group())
    model_parallel_cuda_manual_seed(seed + pipeline_seed())


def pipeline_seed() -> int:
    """Returns the number that this stage adds to the seed, so that no two stages draw the same weights."""
    return 100 * parallel_state.get_pipeline_model_parallel_rank()


_pools: dict[tuple[int, int], dist.ProcessGroup] = {}
"""Maps (tensor-parallel size, pipeline stages) to the group of this rank's server pool, if there are several stages."""


def server_pool_group() -> dist.ProcessGroup:
    """Returns the group of this rank's server pool, with ranks in the order of stages. All ranks call it together.

    With one stage it is Megatron's data-parallel group.
    """
    tp, pp = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    if pp == 1:
        return parallel_state.get_data_parallel_group()
    if _pools.get((tp, pp)) not in dist.distributed_c10d._world.pg_map:  # there is no open group
        # Megatron numbers a tensor-parallel group's ranks one after another, so every tp-th rank is in the same pool.
        for first in range(tp):
            ranks = list(range(first, dist.get_world_size(), tp))
            group = dist.new_group(ranks, timeout=TIMEOUT)
            if dist.get_rank() in ranks:
                _pools[tp, pp] = group
    return _pools[tp, pp]


def destroy_model_parallel() -> None:
    """Closes all process groups but the default one, and makes Megatron forget its groups."""
    quantization.forget_layers()
    parallel_state.destroy_model_parallel()
    _pools.clear()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


@contextmanager
def one_process() -> Iterator[None]:
    """Makes this process the only rank, on the CPU, inside the ``with`` block.

    torch.distributed must not be initialised in this process.
    """
    use_cpu()
    bind_gloo()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        initialize_model_parallel(1, 1, seed=1)
        try:
            yield
        finally:
            destroy_model_parallel()
    finally:
        dist.destroy_process_group()
