"""More ranks than GPUs: what they compute is right, what they take says nothing."""

from __future__ import annotations

import os

import torch

from distca.errors import LaunchError


def share_gpus(rank: int, ranks: int, first: int = 0) -> int:
    """The GPU of a rank of this machine, which it shares where there are fewer of them than ranks.

    NCCL refuses two ranks of one machine on the same GPU. Where they have to share one, each is a machine of its own to
    NCCL, and what it moves goes through sockets. A process calls this before NCCL starts.

    Args:
        rank: of this process.
        ranks: on this machine.
        first: number of rank 0's GPU.

    Raises:
        LaunchError: the machine has no GPU.
    """
    gpus = torch.cuda.device_count()
    if not gpus:
        raise LaunchError(
            f"Rank {rank} of {ranks} asks for a GPU, and torch finds none on this machine.",
            "start the ranks on a machine with GPUs, or without asking for them.",
        )
    if ranks > gpus:
        each_a_machine(rank)
    return (first + rank) % gpus


def each_a_machine(rank: int, ranks: int = 1) -> None:
    """Lets every ``ranks`` ranks of this machine be a machine of their own to NCCL.

    Such machines reach each other only through TCP sockets over the loopback interface, by NCCL's own network code. A
    process reads these variables once, when NCCL starts."""
    os.environ.update(
        NCCL_HOSTID=f"machine{rank // ranks}",
        NCCL_NET="Socket",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_SOCKET_NTHREADS="4",
        NCCL_NSOCKS_PERTHREAD="4",
    )
