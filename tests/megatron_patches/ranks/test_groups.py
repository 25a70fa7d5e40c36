"""megatron's groups made, made again in other sizes, and closed: states to draw from, pools, nothing left open."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from distca.cluster.timeout import TIMEOUT
from distca.errors import SupportError
from distca.testing.ranks import run_ranks

SIZES = ((1, 2), (1, 2), (2, 1), (1, 2))
"""Tensor-parallel ranks and stages, one after the other."""


def _seeded_and_pooled(seed: int) -> list[dict[str, Any]]:
    """By sizes: the seeded states, ranks of the pool, the sum of their numbers by it, and open groups."""
    warnings.filterwarnings("ignore")
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    import torch.distributed as dist
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from distca.cluster.agreement import Agreement
    from megatron_patches.ranks.groups import destroy_model_parallel, initialize_model_parallel, server_pool_group

    found = []
    for sizes in SIZES:
        initialize_model_parallel(*sizes, seed)
        tracker, pool = get_cuda_rng_tracker(), server_pool_group()
        assert server_pool_group() is pool
        states = {name: state.clone() for name, state in tracker.get_states().items()}
        with tracker.fork():  # which moves the state on
            torch.randn(3)
        number = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(number, group=pool)
        groups = len(dist.distributed_c10d._world.pg_map)
        found.append({"states": states, "pool": dist.get_process_group_ranks(pool), "sum": number, "groups": groups})
    with pytest.raises(SupportError, match="expert_model_parallel_size is 2, which does not divide the 1 ranks"):
        initialize_model_parallel(1, 2, seed, ep=2)
    assert server_pool_group() is pool, "a refused call has closed the groups"
    Agreement()  # which makes one more
    made = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    found[-1]["timeouts"] = {group._get_backend(torch.device("cpu")).options._timeout for group in made}
    dist.barrier()  # a rank that is still connecting to the last group would find it closed
    destroy_model_parallel()
    assert len(dist.distributed_c10d._world.pg_map) == 1
    return found


def test_groups_that_come_again_are_new_and_seeded_alike() -> None:
    ranks = run_ranks(2, _seeded_and_pooled, 7)
    for rank in ranks:
        first, kept, other, last = rank
        for again in (kept, last):
            assert all(torch.equal(state, again["states"][name]) for name, state in first["states"].items())
            assert again["pool"] == first["pool"] == [0, 1] and again["sum"] == first["sum"] == 1
            assert again["groups"] == first["groups"], "groups of other sizes were left open"
        assert len(other["pool"]) == 1
        assert last["timeouts"] == {TIMEOUT}, "a group that waits longer than all others"
    drawn = "model-parallel-rng"
    one, two = (rank[0]["states"][drawn] for rank in ranks)
    assert not torch.equal(one, two), "no two stages draw the same weights"


def _pool_of_a_second_world(meeting_point: str) -> bool:
    """Whether it is a group of that world, where megatron's own functions closed the groups of a world before."""
    warnings.filterwarnings("ignore")
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_patches.ranks.groups import initialize_model_parallel, server_pool_group

    rank = dist.get_rank()
    initialize_model_parallel(1, 2, 0)
    server_pool_group()
    dist.barrier()  # a rank that is still connecting to the last group would find it closed
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=2)
    initialize_model_parallel(1, 2, 0)
    return server_pool_group() in dist.distributed_c10d._world.pg_map


def test_a_pool_ends_with_its_world(tmp_path: Path) -> None:
    assert run_ranks(2, _pool_of_a_second_world, str(tmp_path / "ranks")) == [True, True]
