"""The options of core attention disaggregation, once: a run's settings and the arguments of ``distca.CAD`` have them.

A new option is a field here, with its meaning, and a line where it is used. Settings, their page and the API follow.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

Backward = Literal["auto", "keep", "resend"]
TransportName = Literal["auto", "nvshmem", "nccl", "gloo"]
KernelName = Literal["auto", "flash4", "torch", "reference"]
Level = Literal["auto", "attention", "time"]


@dataclass(frozen=True, kw_only=True)
class CadOptions:
    """How rows get to the servers of their attention, and back.

    Attributes:
        ping_pong: compute each micro-batch as two halves, so that one half's transfers hide behind the other's compute.
        backward: keep = the attention server keeps q, k, v and o for the backward pass (fewest bytes moved);
            resend = the home rank keeps them and sends them again (equal memory everywhere); auto = keep, and resend
            with pipeline stages, which need it, with offload, and, in runs with settings, where keep does not fit into
            the GPUs' memory by prediction.
        transport: how rows move; auto is nvshmem inside one machine where it works, else nccl on CUDA devices and gloo
            on CPUs; with auto an exchange that does not fit nvshmem_buffer_gb goes by nccl, with nvshmem it is refused.
        kernel: core-attention kernel; auto takes the fastest one that runs here and passes its self-check.
        tolerance: the planner stops when the busiest server is within this fraction of the mean; null = 0.005 for up
            to 32 servers, growing with them to 0.02 from 128 on, where plans take longer to make.
        deal: deal a step's documents over its micro-batches anew, so that fewer rows move and stages of a pipeline
            wait less; the gradient is the same sum. Only where documents may span ranks.
        ranks_per_node: consecutive attention servers that are planned as one node (a tensor-parallel group is one
            server); 0 takes those of one machine.
        level: what all ranks have alike in every phase of a pipeline: attention, or time = linear layers and attention
            together, so that stages without a micro-batch take more attention than others, and more rows move. Time
            needs pipeline stages and ping_pong; linear layers count as measured, on GPUs without a table as an H200's.
            auto = time on GPUs where all that is so and transport is not nvshmem, else attention.
        cost_table: a measured cost table, a JSON file of `distca profile`; null takes the one of this package for this
            device and kernel, or else a model.
        deterministic: two runs are bitwise equal: gradients of k and v are added in a fixed order.
        nvshmem_buffer_gb: GiB of symmetric memory per rank, in which rows land that travel by NVSHMEM; 0 takes what
            plans for tokens_per_rank need, with room to spare.
        servers: servers without a model, of all tensor-parallel ranks together: GPUs, or CPU processes, beside the
            ranks that train. They have no parameters, optimizer or data, and rows reach them by nccl or gloo.
            SERVERS of pretrain_llama.sh starts them; in a script of your own `distca.serve` is one.
        speeds: of every server of the pool, how many times as fast as the cost table says it computes attention and
            linear layers: a GPU that is found to be slower, or another kind. Homes come first, stage by stage, then
            servers without a model; empty where all are alike. Plans are the same in every run.
    """

    ping_pong: bool = True
    backward: Backward = "auto"
    transport: TransportName = "auto"
    kernel: KernelName = "auto"
    tolerance: float | None = None
    deal: bool = True
    ranks_per_node: int = 0
    level: Level = "auto"
    cost_table: str | None = None
    deterministic: bool = False
    nvshmem_buffer_gb: float = 0.0
    servers: int = 0
    speeds: tuple[float, ...] = ()

    @property
    def shared(self) -> dict[str, Any]:
        """These options by name, without those that a subclass adds."""
        return {option.name: getattr(self, option.name) for option in fields(CadOptions)}
