"""Whether a run fits into its devices' memory: what ``auto`` takes so that it does, and what a refusal names.

Torch may have what the device has without NVSHMEM's receive buffer and without what lies outside torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from distca.device.offload import CHUNK_BYTES
from distca.errors import ConfigError
from distca.train.config.cli import changed, value_of
from distca.train.config.schema import LARGEST_NARROW_BETA2, RunConfig
from distca.train.config.validate_data import longest_document
from distca.train.run.memory import GIB, predict_memory

OUTSIDE_TORCH = int(8.5 * GIB)
"""CUDA context, kernels, NCCL's buffers and workspaces, in bytes. On H200s they were measured beside what torch had
reserved: 6.6 to 8.5 GiB in runs of LLaMA-3.1-8B on two GPUs; 7.9 GiB in runs of LLaMA-3.2-1B on one. Nothing says that
other GPUs or more ranks need as much."""
_WITH_ROOM = 0.95
"""The part of the memory open to torch that ``auto`` and advice fill.

Predictions are off by some percent. An allocator that is full frees and maps memory in turns."""
_FEWEST_TOKENS = 1024
_WITH_OFFLOAD = ("all", "resend")
"""train.recompute and cad.backward that host memory goes with."""
_WITH_OUTPUTS = ("none", "none")
"""train.recompute and train.fp8 with which outputs of norms and SwiGLU can be kept."""

Changes = tuple[tuple[str, object], ...]
"""Settings and their new values."""


class HostMemory(NamedTuple):
    """The machine that has least for each of its ranks: how many ranks, and bytes that are free for all of them."""

    ranks: int
    free: int


def receive_buffer(config: RunConfig, world_size: int) -> int:
    """Bytes of NVSHMEM's receive buffer on a GPU, where it may be made."""
    cad = config.cad
    used = cad.enabled and cad.transport in ("auto", "nvshmem") and world_size > config.parallel.tp and not cad.servers
    return int(config.resolved_nvshmem_buffer_gb * GIB) if used else 0


def resolve(
    config: RunConfig, world_size: int, vocabulary: int, device_bytes: int | None, host: HostMemory
) -> RunConfig:
    """The run with train.recompute, train.keep_outputs, train.offload and cad.backward in place of auto: the fastest
    that fit with room to spare, and if none do, those that need least.

    Args:
        config: a validated run.
        world_size: its ranks.
        vocabulary: rows of the embedding.
        device_bytes: memory of its smallest device; None where there is no limit to know.
        host: of its machines.
    """
    candidates = [changed(config, changes) for changes in _choices(config)]
    if device_bytes is None:
        return next(each for each in candidates if each.train.keep_outputs in ("none", config.train.keep_outputs))
    candidates = [each for each in candidates if _fits_host(each, world_size, vocabulary, host)] or candidates

    def short_of(candidate: RunConfig, share: float) -> float:
        need, room = _need_and_room(candidate, world_size, vocabulary, device_bytes)
        return need - share * room

    fitting = (each for each in candidates if short_of(each, _WITH_ROOM) <= 0)
    return next(fitting, None) or min(candidates, key=lambda each: short_of(each, 1))


def check_memory(config: RunConfig, world_size: int, vocabulary: int, device_bytes: int, host: HostMemory) -> None:
    """Refuse a run that does not fit, with settings that would.

    Args:
        config: the run, without auto.
        world_size: its ranks.
        vocabulary: rows of the embedding.
        device_bytes: memory of its smallest device.
        host: of its machines.

    Raises:
        ConfigError: a stage is predicted to need more than there is.
    """
    need, room = _need_and_room(config, world_size, vocabulary, device_bytes)
    if need <= room:
        return
    if room <= 0:  # a smaller model would not help
        without = "set cad.transport to nccl, or " if receive_buffer(config, world_size) else ""
        raise ConfigError(
            f"The smallest GPU has {device_bytes / GIB:.1f} GiB of memory, and CUDA, NCCL and NVSHMEM count for "
            f"{(device_bytes - room) / GIB:.1f}: {without}run on larger GPUs, or on CPU ranks with GPUS_PER_NODE=0."
        )
    stages = predict_memory(config, world_size, vocabulary)
    worst = max(range(len(stages)), key=lambda number: stages[number].total)
    where = f"Stage {worst} of {len(stages)}" if len(stages) > 1 else "A rank"
    remedies = _remedies(config, world_size, vocabulary, device_bytes, host)
    parallel, experts = config.parallel, config.model.experts.count
    remedies.append(f"raise parallel.tp ({parallel.tp}) or parallel.pp ({parallel.pp})")
    if parallel.ep < min(experts, world_size // parallel.pp):
        remedies.append(f"raise parallel.ep ({parallel.ep}), by which ranks share the {experts} experts")
    raise ConfigError(
        f"{where} would need about {need / GIB:.1f} GiB of device memory, and the device has {room / GIB:.1f} "
        f"beside what CUDA, NCCL and NVSHMEM take: {'; or '.join(remedies)}."
    )


def check_host_memory(config: RunConfig, world_size: int, vocabulary: int, host: HostMemory) -> None:
    """Refuse a run whose ranks keep more for backward than a node has.

    Args:
        config: the run, without auto.
        world_size: its ranks.
        vocabulary: rows of the embedding.
        host: of its machines.

    Raises:
        ConfigError: a node has too little memory.
    """
    if not _fits_host(config, world_size, vocabulary, host):
        need = host.ranks * host_memory_of_a_rank(config, world_size, vocabulary)
        raise ConfigError(
            f"train.offload is all, and what the ranks of a node keep for backward would need about {need / GIB:.1f} "
            f"GiB of host memory, of which {host.free / GIB:.1f} are free: lower data.tokens_per_rank "
            f"({config.data.tokens_per_rank}), or set train.offload to none."
        )


def _fits_host(config: RunConfig, world_size: int, vocabulary: int, host: HostMemory) -> bool:
    return host.ranks * host_memory_of_a_rank(config, world_size, vocabulary) <= _WITH_ROOM * host.free


def host_memory_of_a_rank(config: RunConfig, world_size: int, vocabulary: int) -> int:
    """Bytes that the fullest stage's rank takes: whole pieces."""
    need = max(stage.host for stage in predict_memory(config, world_size, vocabulary))
    return -(-need // CHUNK_BYTES) * CHUNK_BYTES


def _need_and_room(config: RunConfig, world_size: int, vocabulary: int, device_bytes: int) -> tuple[int, int]:
    """Bytes that torch needs on the fullest stage, and those that it may have."""
    need = max(stage.total for stage in predict_memory(config, world_size, vocabulary))
    return need, device_bytes - receive_buffer(config, world_size) - OUTSIDE_TORCH


def _choices(config: RunConfig) -> list[Changes]:
    """Values for what is auto, fastest first: sending rows again and host memory hide behind computation, computing
    again does not. Host memory comes last, as all is computed again with it."""
    train, cad, stages = config.train, config.cad, config.parallel.pp
    recompute: Sequence[str] = [config.resolved_recompute]
    if train.recompute == "auto" and train.offload != "all":
        recompute = ["none", "mlp", "all"]
    backward: Sequence[str] = [config.resolved_backward]
    if cad.enabled and cad.backward == "auto" and stages == 1 and train.offload != "all":
        backward = ["keep", "resend"]
    offload: Sequence[str] = [train.offload]
    if train.offload == "auto":
        offload = ["none", "all"] if _can_offload(config) else ["none"]
    outputs: Sequence[str] = ["all", "none"] if train.keep_outputs == "auto" else [train.keep_outputs]
    return [
        (("train.recompute", again), ("train.keep_outputs", kept), ("cad.backward", how), ("train.offload", where))
        for where, again, how, kept in itertools.product(offload, recompute, backward, outputs)
        if (where == "none" or (again, how) == _WITH_OFFLOAD)
        and (kept == "none" or (again, train.fp8) == _WITH_OUTPUTS)
    ]


def _can_offload(config: RunConfig) -> bool:
    model, cad = config.model, config.cad
    unserved = model.experts.count or model.hybrid.pattern or cad.servers
    return cad.enabled and config.parallel.pp == 1 and not unserved


def _remedies(config: RunConfig, world_size: int, vocabulary: int, device_bytes: int, host: HostMemory) -> list[str]:
    """In words, the cheapest changes with which the run fits: with its tokens per rank, and without them."""

    def fits(changes: Changes, tokens: int) -> bool:
        tried = changed(config, (*changes, *_lowered(config, world_size, tokens)))
        if (tried.train.moments != "float32" or tried.train.fp8_weights) and not tried.optimizer.distributed:
            return False  # not served
        if tried.train.offload == "all" and (tried.resolved_recompute, tried.resolved_backward) != _WITH_OFFLOAD:
            return False
        if tried.train.keep_outputs == "all" and (tried.resolved_recompute, tried.train.fp8) != _WITH_OUTPUTS:
            return False
        need, room = _need_and_room(tried, world_size, vocabulary, device_bytes)
        return need <= _WITH_ROOM * room

    tokens, remedies, changes = config.data.tokens_per_rank, [], _savings(config)
    if not _fits_host(changed(config, changes), world_size, vocabulary, host):
        changes = tuple(change for change in changes if change[0] != "train.offload")
    if needed := _fewest(changes, lambda some: fits(some, tokens)):
        remedies.append(_set(needed))
    fewer = tokens // 2
    while fewer >= _FEWEST_TOKENS and not fits(() if needed else changes, fewer):
        fewer //= 2
    if fewer >= _FEWEST_TOKENS:
        with_it = () if needed else _fewest(changes, lambda some: fits(some, fewer)) or ()
        lowered = [
            f"{name} ({value_of(config, name)}) to {value}" for name, value in _lowered(config, world_size, fewer)
        ]
        remedies.append(" and ".join([*([_set(with_it)] if with_it else []), f"lower {' and '.join(lowered)}"]))
    return remedies


def _lowered(config: RunConfig, world_size: int, tokens: int) -> Changes:
    """Fewer tokens on a rank, and shorter documents where the longest would not fit into them."""
    fewer: Changes = (("data.tokens_per_rank", tokens),)
    longest = longest_document(changed(config, fewer), world_size)
    return fewer if config.data.context_length <= longest else (*fewer, ("data.context_length", longest))


def _savings(config: RunConfig) -> Changes:
    """Returns the changes that save memory and that the run does not make yet, cheapest first; a later value of a
    setting saves more."""
    cad, train = config.cad, config.train
    possible = {
        ("optimizer.distributed", True): True,
        ("train.keep_outputs", "none"): train.keep_outputs == "all",
        ("train.fp8_weights", True): train.fp8 != "none",
        ("cad.backward", "resend"): cad.enabled and config.resolved_backward == "keep",
        ("train.recompute", "mlp"): train.recompute == "none",
        ("train.recompute", "all"): train.recompute != "all",
        ("train.offload", "all"): _can_offload(config),
        ("train.gradients", "bfloat16"): train.precision == "bf16",
        ("train.moments", "bfloat16"): train.precision == "bf16" and config.optimizer.beta2 <= LARGEST_NARROW_BETA2,
    }
    return tuple(change for change, can_be in possible.items() if can_be and value_of(config, change[0]) != change[1])


def _fewest(changes: Changes, fits: Callable[[Changes], bool]) -> Changes | None:
    """Returns as few of the changes, in order, as are needed to fit; None if all of them do not do."""
    taken: Changes = ()
    for change in changes:
        taken = (*(each for each in taken if each[0] != change[0]), change)
        if fits(taken):
            break
    else:
        return None
    for change in taken[:-1]:
        fewer = tuple(each for each in taken if each != change)
        taken = fewer if fits(fewer) else taken
    return taken


def _set(changes: Changes) -> str:
    *others, last = (f"{name} to {str(value).lower()}" for name, value in changes)
    return "set " + (f"{', '.join(others)} and {last}" if others else last)
