"""Choose a transport once, say which and why, and let the user decide otherwise."""

from __future__ import annotations

import importlib.util
import logging
import socket

import torch
import torch.distributed as dist

from distca.transport import native
from distca.transport.collective import CollectiveTransport
from distca.transport.transport import Transport, TransportError

logger = logging.getLogger(__name__)

NAMES = ("auto", "nvshmem", "nccl", "gloo")
DEFAULT_BUFFER_GB = 2.0

# NVSHMEM starts once per process, and exchanges are numbered from its start: one transport per process.
_started: dict[tuple[int, ...], Transport] = {}


def choose_transport(name: str, group: dist.ProcessGroup, buffer_gb: float = DEFAULT_BUFFER_GB) -> Transport:
    """Return the named transport over ``group``, or with "auto" NVSHMEM where it works and else the one of the group's
    backend. Every rank of the group calls it together.

    Args:
        name: "auto", "nvshmem", "nccl" or "gloo".
        group: the server pool.
        buffer_gb: GiB of symmetric memory per rank, for NVSHMEM.

    Raises:
        TransportError: the name is unknown or that transport cannot be used here; the message says why.
    """
    if name not in NAMES:
        raise TransportError(f"cad.transport is '{name}'; it can be {', '.join(NAMES)}.")
    ranks = tuple(dist.get_process_group_ranks(group))
    if name in ("auto", "nvshmem") and ranks in _started:
        return _started[ranks]
    reason = None
    if name in ("auto", "nvshmem"):
        reason = why_not_nvshmem_together(group)
        if reason is None:
            transport = _nvshmem_transport(group, buffer_gb)
            logger.info(
                "Transport: nvshmem over %d ranks, %.3g GiB of symmetric memory each", transport.ranks, buffer_gb
            )
            return transport
        if name == "nvshmem":
            raise TransportError(
                f"cad.transport=nvshmem cannot be used here: {reason}. Set cad.transport=auto to take another."
            )
    collective = CollectiveTransport(group)
    if name not in ("auto", collective.name):
        raise TransportError(
            f"cad.transport={name} cannot be used here: the ranks talk over {collective.name}. Set cad.transport=auto."
        )
    logger.info(
        "Transport: %s over %d ranks%s",
        collective.name,
        collective.ranks,
        f" (not nvshmem: {reason})" if reason and torch.cuda.is_available() else "",
    )
    return collective


def why_not_nvshmem() -> str | None:
    """Why this process cannot use NVSHMEM, or None; asks no other rank."""
    if not torch.cuda.is_available():
        return "it moves GPU memory, and torch finds no GPU here"
    if not native.is_available():
        return "the CUDA library of csrc/ is not built; install again on a machine with nvcc"
    if importlib.util.find_spec("nvshmem") is None:
        return "nvshmem4py is not installed"
    if importlib.util.find_spec("cuda") is None:
        return "cuda-python, which nvshmem4py needs, is not installed"
    return None


def why_not_nvshmem_together(group: dist.ProcessGroup) -> str | None:
    """Why the ranks of ``group`` cannot use NVSHMEM among themselves, or None; the same answer on every rank."""
    own = why_not_nvshmem()
    if own is None and dist.get_backend(group) == "gloo":
        own = "the ranks hold their rows in CPU memory"
    mine = (own, socket.gethostname(), torch.cuda.current_device() if torch.cuda.is_available() else 0)
    everyone: list[tuple[str | None, str, int]] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for rank, (reason, _, _) in enumerate(everyone):
        if reason is not None:
            return f"on rank {rank}, {reason}" if rank else reason
    hosts = {host for _, host, _ in everyone}
    if len(hosts) > 1:
        return f"the server pool spans {len(hosts)} machines, and rows between machines go by NCCL"
    return why_no_peer_access([device for _, _, device in everyone])


def why_no_peer_access(devices: list[int]) -> str | None:
    """Why these GPUs of this machine cannot write into each other's memory, or None."""
    if len(set(devices)) < len(devices):
        return "several ranks share a GPU"
    for a in devices:
        for b in devices:
            visible = max(a, b) < torch.cuda.device_count()
            if a != b and visible and not torch.cuda.can_device_access_peer(a, b):
                return f"GPU {a} has no peer access to GPU {b}"
    return None


def _nvshmem_transport(group: dist.ProcessGroup, buffer_gb: float) -> Transport:
    ranks = tuple(dist.get_process_group_ranks(group))
    if ranks not in _started:
        if _started:
            raise TransportError(
                f"NVSHMEM already runs over ranks {next(iter(_started))} in this process and cannot start again over "
                f"{ranks}; set cad.transport=nccl."
            )
        from distca.transport.nvshmem import NvshmemFabric
        from distca.transport.one_sided import OneSidedTransport

        _started[ranks] = OneSidedTransport(NvshmemFabric(group, int(buffer_gb * 2**30)), "nvshmem")
    return _started[ranks]
