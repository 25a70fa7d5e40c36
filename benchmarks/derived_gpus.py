"""Derives attention's cost table of a GPU that was not measured from the table of a measured one.

A derived time is the measured time, multiplied by the ratio of the two GPUs' peak FLOP/s. It is at least the time of
reading and writing a task's rows at the GPU's memory bandwidth. So it supposes a kernel that reaches the same part of
the peak. Peaks are the makers' figures for SXM boards: FLOP/s of dense bfloat16 products, and memory bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.plan import TableCost


@dataclass(frozen=True)
class Gpu:
    """Peaks of a kind of GPU.

    Attributes:
        flops: FLOP/s of dense matrix products in bfloat16.
        bandwidth: bytes/s of its memory.
        network_gb_s: GB/s of one GPU between nodes, each way, in the makers' nodes of eight GPUs.
        memory_gib: GiB of its memory.
    """

    flops: float
    bandwidth: float
    network_gb_s: float
    memory_gib: float


GPUS = {
    "H100": Gpu(989e12, 3.35e12, 50.0, 79.6),
    "A100": Gpu(312e12, 2.04e12, 25.0, 79.3),
    "H20": Gpu(148e12, 4.0e12, 50.0, 95.6),
}
"""GPUs by name. A node has eight network cards of 400 Gbit/s, or of 200 with A100s."""


def derived(measured: TableCost, source: Gpu, target: Gpu) -> TableCost:
    """Returns the table of the GPU ``target``, derived from one that was measured on ``source``."""
    columns = measured.measured
    q_rows, kv_rows = np.meshgrid(columns["q_rows"], columns["kv_rows"], indexing="ij")
    shape, ratio = measured.shape, source.flops / target.flops
    moved = {
        "forward_seconds": 2 * q_rows * shape.q_bytes + kv_rows * shape.kv_bytes,
        "backward_seconds": 4 * q_rows * shape.q_bytes + 2 * kv_rows * shape.kv_bytes,
    }
    forward, backward = (np.maximum(columns[way] * ratio, size / target.bandwidth) for way, size in moved.items())
    return TableCost(
        shape,
        columns["q_rows"],
        columns["kv_rows"],
        forward,
        backward,
        measured.block,
        measured.load,
        window=measured.window,
    )
