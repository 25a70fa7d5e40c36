"""The record that a rank keeps while a mode is measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from benchmarks.throughput.busy import Traced


@dataclass
class RankRecord:
    """The record of one rank for a mode. Lists have one entry per measured batch.

    Attributes:
        seconds: of the step, waiting for its inputs included.
        attention_s: in core-attention kernels; of peers not known.
        planned_s: the same as planned, of one layer; 0 where nothing is planned; of peers not known.
        cpu_s: CPU time of the process.
        loss: mean loss per target token of the global batch.
        grad_norm: of the whole gradient, before clipping.
        exposed_s: by transfer, that compute waited for it; empty but for DistCA.
        plan_ms: of planning, in the background.
        wait_ms: that the step waited for its inputs.
        kernel_planning_s: in which a library planned attention of a new shape, on the host; of peers only.
        bytes_moved: by all ranks, for core attention.
        rows: rows of the rank's micro-batches, padding included.
        memory_gib: peak while measured, memory of NVSHMEM included; None on CPUs, where only the process's size of the
            moment could be read, which holds what earlier modes left.
        reserved_gib: peak that torch's allocator held; None on CPUs.
        predicted_gib: the peak as it was predicted, NVSHMEM's memory included; None on CPUs.
        recompute: what was computed again in backward.
        backward: whether servers kept rows for backward, or had them sent again.
        keep_outputs: whose outputs were kept for backward.
        offload: what waited for it in host memory.
        fallback_exchanges: exchanges that did not fit NVSHMEM's memory and went by NCCL.
        traced: what the GPU did in the traced batches; None where nothing was traced.
        gpus: clocks, power and temperature of the first machine's GPUs while measured, on rank 0.
    """

    seconds: list[float] = field(default_factory=list)
    attention_s: list[float] = field(default_factory=list)
    planned_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    exposed_s: list[dict[str, float]] = field(default_factory=list)
    plan_ms: list[float] = field(default_factory=list)
    wait_ms: list[float] = field(default_factory=list)
    kernel_planning_s: list[float] = field(default_factory=list)
    bytes_moved: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    memory_gib: float | None = None
    reserved_gib: float | None = None
    predicted_gib: float | None = None
    outside_torch_gib: float | None = None
    recompute: str = "none"
    backward: str = "keep"
    keep_outputs: str = "none"
    offload: str = "none"
    fallback_exchanges: int = 0
    traced: Traced | None = None
    gpus: list[dict[str, Any]] = field(default_factory=list)


def of_all_ranks(record: RankRecord, ranks: int) -> list[RankRecord]:
    """Every rank's record, on every rank; by gloo, which takes no GPU memory. Every rank calls it together."""
    records: list[RankRecord] = [record] * ranks
    dist.all_gather_object(records, record)
    return records
