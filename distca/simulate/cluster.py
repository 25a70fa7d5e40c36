"""The machines of a simulated run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from distca.errors import SimulationError


@dataclass(frozen=True)
class Cluster:
    """GPUs, nodes and links. Rates are those of one GPU, in each direction.

    Attributes:
        gpus: number of GPUs on all nodes.
        gpus_per_node: number of GPUs of a node, which NVLink connects.
        nvlink_gb_s: GB/s of rows between GPUs of a node.
        network_gb_s: GB/s of rows between nodes.
        nvlink_latency_us: microseconds from a launch to the first byte inside a node.
        network_latency_us: microseconds from a launch to the first byte between nodes.
        memory_gib: GiB of a GPU's memory.
        slow_gpus: number of last GPUs whose nodes have a slower network; 0 for none.
        slow_network_gb_s: GB/s of a GPU in that network.
        nvlink_collective_gb_s: GB/s of all-gathers and reduce-scatters inside a node; 0 is ``nvlink_gb_s``.
        network_collective_gb_s: GB/s of all-gathers and reduce-scatters between nodes; 0 is ``network_gb_s``.

    Raises:
        SimulationError: a count, rate or size is not possible.
    """

    gpus: int
    gpus_per_node: int = 8
    nvlink_gb_s: float = 370.0
    network_gb_s: float = 50.0
    nvlink_latency_us: float = 15.0
    network_latency_us: float = 30.0
    memory_gib: float = 139.8
    slow_gpus: int = 0
    slow_network_gb_s: float = 50.0
    nvlink_collective_gb_s: float = 0.0
    network_collective_gb_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("gpus", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise SimulationError(f"`{name}` is {getattr(self, name)}; it must be at least 1.")
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise SimulationError(
                f"`gpus` is {self.gpus}, which nodes of {self.gpus_per_node} do not divide; change `gpus` or "
                "`gpus_per_node`."
            )
        for name in ("nvlink_gb_s", "network_gb_s", "memory_gib", "slow_network_gb_s"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise SimulationError(f"`{name}` is {value:g}; it must be above 0.")
        for name in (
            *("nvlink_latency_us", "network_latency_us"),
            *("nvlink_collective_gb_s", "network_collective_gb_s"),
        ):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise SimulationError(f"`{name}` is {value:g}; it must be 0 or more.")

    @property
    def nodes(self) -> int:
        """The number of nodes; the last one need not be full."""
        return -(-self.gpus // self.gpus_per_node)
