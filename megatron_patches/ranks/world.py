"""Starts and ends torch.distributed: a script calls ``distca.join_world()`` before it makes Megatron's groups."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

from distca.cluster.environment import check_gpus_usable, gpu_of, launched
from distca.cluster.process import end_with_torchrun
from distca.cluster.world import World, initialize
from distca.device.host_memory import keep_freed_memory
from distca.errors import LaunchError
from distca.transport.collective import nccl_goes_first

__all__ = ["World", "join_world", "leave_world"]

_left = False
"""Whether this process has called :func:`leave_world`."""


def join_world() -> World:
    """Initialises torch.distributed from the launcher's variables; NCCL for tensors on GPUs, gloo for those on CPUs.

    Without a launcher (``python pretrain_llama.py``) this process is the only rank. Under torchrun the process ends
    when torchrun is killed.

    Returns:
        This process's rank, the number of ranks, and its device.

    Raises:
        LaunchError: torch.distributed is initialised already; this process has called :func:`leave_world`; a variable
            of the launcher is missing or has an impossible value; or torch cannot use this machine's GPUs.
    """
    if dist.is_initialized():
        raise LaunchError(
            "torch.distributed is initialised already.",
            "call distca.join_world() in place of torch.distributed.init_process_group.",
        )
    if _left:
        raise LaunchError(
            "This process has left its world (distca.leave_world), and cannot join a second one.",
            "call distca.leave_world() only at the script's end, or start another process.",
        )
    end_with_torchrun()
    told = launched()
    check_gpus_usable(torch.cuda.is_available(), torch.__version__)
    if torch.cuda.is_available():
        device = torch.device("cuda", gpu_of(told.local_rank, torch.cuda.device_count()))
        torch.cuda.set_device(device)
        nccl_goes_first()
        initialize(told, "cpu:gloo,cuda:nccl", device)
    else:
        device = torch.device("cpu")
        _use_cpu()
        keep_freed_memory()
        initialize(told, "gloo")
    return World(told.rank, told.size, device)


def leave_world() -> None:
    """Closes all process groups, including Megatron's, at a script's end.

    A process cannot join a second world: Megatron keeps the closed groups, and torchrun's store has old messages.
    """
    global _left
    dist.destroy_process_group()
    _left = True


def _use_cpu() -> None:
    with warnings.catch_warnings():
        # Importing Megatron-Core warns of missing CUDA libraries, which CPUs do not need.
        warnings.simplefilter("ignore")
        from megatron_patches.patches.cpu import use_cpu

        use_cpu()
