"""This process's place among the ranks, and Megatron-Core as it is."""

from __future__ import annotations

import warnings

import torch

from benchmarks.peers import apex
from distca.cluster.environment import check_gpus_usable, gpu_of, launched
from distca.cluster.parent import end_with_torchrun
from distca.cluster.world import World, initialize
from distca.transport.collective import nccl_goes_first


def join_unmodified() -> World:
    """Does what ``distca.join_world`` does, without a part of Megatron-Core replaced, unless ranks are CPUs.

    Raises:
        LaunchError: the launcher's variables cannot be meant so, or GPUs are meant that torch cannot use.
    """
    end_with_torchrun()
    told = launched()
    check_gpus_usable(torch.cuda.is_available(), torch.__version__)
    if torch.cuda.is_available():
        device = torch.device("cuda", gpu_of(told.local_rank, torch.cuda.device_count()))
        torch.cuda.set_device(device)
        apex.stand_in()
        nccl_goes_first()
        initialize(told, "cpu:gloo,cuda:nccl", device)
    else:
        from benchmarks.peers.on_cpus import use_cpus

        device = torch.device("cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # once per module, that CUDA libraries are missing
            use_cpus()
        initialize(told, "gloo")
    return World(told.rank, told.size, device)
