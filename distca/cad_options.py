"""The options that a run's settings and the arguments of ``distca.CAD`` have in common.

A new option needs a field here, with its meaning, and a line where it is used. It then appears among the settings, on
their page and in the API.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

Backward = Literal["auto", "keep", "resend"]
TransportName = Literal["auto", "nvshmem", "nccl", "gloo"]
KernelName = Literal["auto", "flash4", "torch", "reference"]


@dataclass(frozen=True, kw_only=True)
class CadOptions:
    """How core attention is spread over servers; every rank is one, beside being the home of its own rows.

    Attributes:
        ping_pong: compute each micro-batch as two nano-batches, to hide the transfers of one behind the other's
            compute.
        backward: keep = the attention server keeps q, k, v and o for backward (fewest bytes); resend = the home rank
            keeps and resends them (equal memory); auto = keep, but resend with pipeline stages or offload, and (trainer
            only) where keep would not fit.
        transport: how rows move; auto is nvshmem inside one machine where it works, else nccl on GPUs and gloo on CPUs.
            An exchange that does not fit nvshmem_buffer_gb goes by nccl with auto, and is refused with nvshmem.
        kernel: core-attention kernel; auto takes on each server the fastest that passes its self-check.
        tolerance: the planner stops when the busiest server has at most this fraction above the mean; null = 0.005 for
            up to 32 servers, growing to 0.02 from 128 on.
        ranks_per_node: number of consecutive servers (tensor-parallel groups) that plans treat as one node; 0 takes
            those of one machine.
        cost_table: a JSON file of `distca profile`, or a folder with one for each GPU and kernel; null takes those
            shipped, or else an analytic model. "measure" measures what is not shipped when the trainer starts, and
            keeps it in output/cost_tables. Servers without a model also measure what a named folder lacks.
        deterministic: add gradients of k and v in a fixed order, so two runs are bitwise equal.
        nvshmem_buffer_gb: GiB of symmetric memory per rank for rows that arrive by NVSHMEM; 0 takes as much as
            tokens_per_rank needs.
        servers: number of servers without a model beside the ranks that train, for all tensor-parallel ranks together.
            Rows reach them by nccl or gloo. SERVERS of pretrain_llama.sh or `distca.serve` starts them.
        speeds: each server's speed relative to its cost table. Homes come first, stage by stage, then servers without a
            model; empty where all are as their tables say. A later server has its number's speed, else 1.
            Plans divide it by the number of servers on its GPU.
        server_gb_s: GB/s over the network that plans expect of a server without a model, or of all on its GPU together;
            0 = 51, as for homes.
    """

    ping_pong: bool = True
    backward: Backward = "auto"
    transport: TransportName = "auto"
    kernel: KernelName = "auto"
    tolerance: float | None = None
    ranks_per_node: int = 0
    cost_table: str | None = None
    deterministic: bool = False
    nvshmem_buffer_gb: float = 0.0
    servers: int = 0
    speeds: tuple[float, ...] = ()
    server_gb_s: float = 0.0

    @property
    def shared(self) -> dict[str, Any]:
        """These options by name, without those that a subclass adds."""
        return {option.name: getattr(self, option.name) for option in fields(CadOptions)}
