"""Kinds of GPUs without measurements: their cost tables are derived from a measured one.

A derived time is what the measured GPU took times the ratio of both GPUs' peak FLOP/s. It is at least what reading and
writing a task's rows takes at the GPU's memory bandwidth. So it supposes a kernel that reaches the same part of the
peak. Peaks are the makers': dense bfloat16, and memory bandwidth, of the SXM boards.
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
        network_gb_s: GB/s of one GPU between nodes, of the makers' own nodes of eight.
        memory_gib: GiB.
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
"""GPUs by name. Networks: eight cards of 400 Gbit/s a node, of A100 nodes 200."""


def derived(measured: TableCost, source: Gpu, target: Gpu) -> TableCost:
    """The table of a ``target`` GPU, derived from one measured on the ``source``."""
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
