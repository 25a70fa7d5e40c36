"""Megatron's models in one process on its CPU, for tasks that need no ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from distca.cluster.interface import bind_gloo
from megatron_patches.patches.cpu import use_cpu
from megatron_patches.ranks.groups import destroy_model_parallel, initialize_model_parallel


@contextmanager
def one_process() -> Iterator[None]:
    """Gives Megatron groups of one rank while the block runs; torch.distributed must not be initialised in this
    process."""
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
