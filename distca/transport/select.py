"""Chooses the transport of attention rows (q, k, v, outputs, gradients) between ranks: NVSHMEM, NCCL or gloo.

With NVSHMEM, GPUs write into each other's memory. NCCL and gloo run torch.distributed's all-to-all. All ranks that
compute attention for each other, the *server pool*, must choose the same transport. So each rank tells the others of
the pool if it cannot use NVSHMEM.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Sequence
from typing import Literal, TypeVar, get_args

import torch
import torch.distributed as dist

from distca.cluster.process import machine_name
from distca.errors import TransportError
from distca.transport import cuda_ops
from distca.transport.collective import CollectiveTransport
from distca.transport.interface import Transport
from distca.transport.nvshmem.transport import OneSidedTransport
from distca.words import count

logger = logging.getLogger(__name__)

T = TypeVar("T")

TransportName = Literal["auto", "nvshmem", "nccl", "gloo"]
NAMES: tuple[str, ...] = get_args(TransportName)
DEFAULT_BUFFER_GB = 2.0
"""The size of NVSHMEM's receive buffer, in GiB per rank, for callers that give none, such as tests. ``distca.CAD``
gives the user's size, or one that it computes from the tokens per rank."""

BETWEEN_NODES = (
    "between nodes rows go by NCCL, because NVSHMEM has not been measured on a network; set `transport` to nvshmem to "
    "use NVSHMEM there"
)

_started: dict[tuple[int, ...], tuple[OneSidedTransport, float]] = {}
"""Maps the pool's global ranks to the NVSHMEM transport and the GiB of its receive buffer. There is at most one entry,
since NVSHMEM starts once per process."""
_failed: list[str] = []
"""The reason why NVSHMEM did not start, if it failed. This process does not try again."""
_ALONE_S = 3.0
"""If NVSHMEM fails to start on a rank, NVSHMEM may hang on others. The rank where it fails waits until all others have
started or failed. If they have not after this many seconds, the rank raises an error."""


def choose_transport(
    name: str, group: dist.ProcessGroup, buffer_gb: float = DEFAULT_BUFFER_GB, waits_at_once: bool = False
) -> Transport:
    """Returns a transport over ``group``. All ranks of the group must call this at the same time.

    Args:
        name: "nvshmem", "nccl", "gloo" or "auto". "auto" takes NVSHMEM if the pool is on one node and NVSHMEM works, or
            if NVSHMEM runs over these ranks already; otherwise it takes the backend of ``group``.
        group: process group of the pool.
        buffer_gb: size of NVSHMEM's receive buffer, in GiB per rank; 0 if no rows travel. NVSHMEM does not start then.
            An exchange that gets no place in the buffer goes by the backend of ``group`` with "auto", and is refused
            with "nvshmem".
        waits_at_once: whether callers wait for an exchange right after its launch, and compute nothing meanwhile.

    Raises:
        TransportError: the name is unknown; the transport cannot be used here; or, also with "auto", NVSHMEM fails to
            start on this rank and hangs on others.
    """
    if name not in NAMES:
        raise TransportError(f"`transport` is '{name}'; it can be {', '.join(NAMES)}.")
    ranks = tuple(dist.get_process_group_ranks(group))
    collective = CollectiveTransport(group)
    fallback = collective if name == "auto" else None
    wants_nvshmem = name in ("auto", "nvshmem") and buffer_gb > 0
    if wants_nvshmem and ranks in _started:
        return _started_before(ranks, buffer_gb, fallback, waits_at_once)
    reason = None
    if wants_nvshmem:
        reason = why_not_nvshmem_together(group, between_nodes=name == "nvshmem")
        if reason is None:
            started = _start_nvshmem(group, buffer_gb, fallback)
            if not isinstance(started, str):
                logger.info(
                    "Transport: nvshmem over %s, %.3g GiB of symmetric memory each",
                    count(started.ranks, "rank"),
                    buffer_gb,
                )
                started.waits_at_once = waits_at_once
                return started
            reason = started
            if name == "auto":
                logger.warning("NVSHMEM is here but does not start, so rows go by %s: %s", collective.name, reason)
        if name == "nvshmem":
            raise TransportError(
                f"`transport` nvshmem cannot be used here: {reason}. Set `transport` to auto to take another."
            )
    if name not in ("auto", "nvshmem", collective.name):
        raise TransportError(
            f"`transport` {name} cannot be used here: the ranks talk over {collective.name}. Set `transport` to auto."
        )
    logger.info(
        "Transport: %s over %s%s",
        collective.name,
        count(collective.ranks, "rank"),
        f" (not nvshmem: {reason})" if reason and torch.cuda.is_available() else "",
    )
    return collective


def _started_before(
    ranks: tuple[int, ...], buffer_gb: float, fallback: Transport | None, waits_at_once: bool
) -> OneSidedTransport:
    transport, has_gb = _started[ranks]
    if buffer_gb > has_gb:
        logger.warning(
            "NVSHMEM started with %.3g GiB of symmetric memory per rank; %.3g GiB are asked for now, but a process "
            "cannot get more after the start. Exchanges that do not fit %s. Set the larger size before NVSHMEM starts.",
            *(has_gb, buffer_gb, f"go by {fallback.name}" if fallback else "are refused"),
        )
    return transport.for_another(fallback, waits_at_once)


def why_not_nvshmem() -> str | None:
    """Returns the reason why this process cannot use NVSHMEM; None if it can."""
    if not torch.cuda.is_available():
        return "torch finds no GPU here"
    if cuda_ops.why_no_signals() is not None:
        return cuda_ops.why_no_signals()
    if importlib.util.find_spec("nvshmem") is None:
        return "nvshmem4py is not installed"
    try:
        import nvshmem.core

        nvshmem.core.get_version()  # loads the library of NVSHMEM
    except Exception as error:  # NVSHMEM's libraries raise errors of many kinds.
        return f"nvshmem4py does not load: {error}"
    return None


def why_not_nvshmem_together(group: dist.ProcessGroup, between_nodes: bool) -> str | None:
    """Returns the reason why the ranks of ``group`` cannot or should not start NVSHMEM; None if they can.

    All ranks must call this at the same time, and all get the same answer.

    Args:
        between_nodes: whether NVSHMEM may also be used between nodes.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return "there is one rank, which sends no rows"
    # The ranks may have been in different pools before, so each tells the others what happened there.
    for past in _gather(_why_not_again(tuple(ranks)), group):
        if past is not None:
            return past
    own = why_not_nvshmem()
    if own is None and dist.get_backend(group) == "gloo":
        own = "the ranks hold their rows in CPU memory"
    places = _gather((machine_name(), _gpu(torch.cuda.current_device()) if own is None else ""), group)
    nodes = {node for node, _ in places}
    gpus = [gpu for node, gpu in places if gpu and node == machine_name()]
    if own is None:
        own = "several ranks share a GPU" if len(set(gpus)) < len(gpus) else why_no_peer_access(gpus)
    # All ranks return the reason of the lowest rank that has one.
    for rank, reason in zip(ranks, _gather(own, group), strict=True):
        if reason is not None:
            return f"on rank {rank}, {reason}" if rank else reason
    if len(nodes) > 1 and not between_nodes:
        return f"the server pool spans {len(nodes)} nodes, and {BETWEEN_NODES}"
    return None


def _why_not_again(ranks: tuple[int, ...]) -> str | None:
    """Returns the reason why NVSHMEM, which starts once in a process, cannot start over ``ranks`` here, or None."""
    if _failed:
        return _failed[0]
    if _started and ranks not in _started:
        return f"NVSHMEM runs over ranks {next(iter(_started))} already, and starts only once in a process"
    return None


def why_no_peer_access(gpus: Sequence[str] | None = None) -> str | None:
    """Returns the reason why GPUs of this node cannot write into each other's memory; None if they can.

    Args:
        gpus: UUIDs of GPUs; None stands for all visible GPUs. GPUs that this process does not see are not checked.
    """
    visible = {_gpu(index): index for index in range(torch.cuda.device_count())}
    indices = [visible[gpu] for gpu in (visible if gpus is None else gpus) if gpu in visible]
    for a in indices:
        for b in indices:
            if a != b and not torch.cuda.can_device_access_peer(a, b):
                return f"GPU {a} has no peer access to GPU {b}"
    return None


def _gpu(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _gather(mine: T, group: dist.ProcessGroup) -> list[T]:
    everyone = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _start_nvshmem(group: dist.ProcessGroup, buffer_gb: float, fallback: Transport | None) -> OneSidedTransport | str:
    """Starts NVSHMEM and returns a transport; if the start fails on any rank, all ranks return that rank's reason.

    Raises:
        TransportError: NVSHMEM fails to start on this rank, and hangs on others.
    """
    transport, own = None, None
    ranks = dist.get_process_group_ranks(group)
    try:
        transport = _nvshmem_transport(group, buffer_gb, fallback)
    except Exception as error:
        own = str(error).splitlines()[0] if str(error) else type(error).__name__
    if not _all_came_back(ranks, 0 if own is None else _ALONE_S):
        raise TransportError(
            f"NVSHMEM does not start on rank {dist.get_rank()}: {own}. Other ranks wait inside NVSHMEM for this rank, "
            "so they cannot take another transport. Set `transport` to nccl."
        )
    for rank, reason in zip(ranks, _gather(own, group), strict=True):
        if reason is not None:
            _failed.append(f"on rank {rank}, it does not start: {reason}")
            return _failed[-1]
    assert transport is not None
    _started[tuple(ranks)] = transport, buffer_gb
    return transport


def _all_came_back(ranks: Sequence[int], seconds: float) -> bool:
    """Tells the other ranks that the start of NVSHMEM has ended on this rank, with or without success.

    Returns whether it has ended on all ranks within ``seconds``; with 0 seconds, returns True without waiting."""
    store, key = dist.distributed_c10d._get_default_store(), f"distca/nvshmem/{ranks[0]}"
    store.add(key, 1)
    end = time.monotonic() + seconds
    while seconds and store.add(key, 0) < len(ranks):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _nvshmem_transport(group: dist.ProcessGroup, buffer_gb: float, fallback: Transport | None) -> OneSidedTransport:
    from distca.transport.nvshmem.symmetric_memory import NvshmemFabric

    return OneSidedTransport(NvshmemFabric(group, int(buffer_gb * 2**30)), "nvshmem", fallback)
