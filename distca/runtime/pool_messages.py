"""The messages between homes, which are the ranks that train, and servers without a model, which compute attention.

Homes and servers write these objects, pickled, into the store of their *pool* (:mod:`distca.cluster.pool_store`). This
pool has all homes and all servers, of every tensor-parallel rank. A *generation* is the pool while its members stay the
same.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from distca.attention import AttentionSpec
from distca.cluster.process import Process
from distca.errors import SupportError
from distca.plan import PlanOptions

FORMING = timedelta(seconds=20)
"""The time limit for the processes of a later generation to connect. If gloo does not connect them in time, homes start
another generation. NCCL keeps to no time limit, so with NCCL homes end the run instead. For the first generation the
limit is ``TIMEOUT``, after which the run ends."""


@dataclass(frozen=True)
class PoolTerms:
    """The facts about the homes' model that a server needs.

    Attributes:
        spec: core attention on a home, with heads, dtype, device and the layers' kinds (such as window and scale).
        backward: "keep" if servers keep q, k and v until backward; "resend" if homes send these rows again.
        layers: numbers, from 0, of a pipeline stage's layers with attention, equal for all stages; empty means that all
            layers have attention. In a HybridModel units count as layers: each has one attention or recurrent layer.
    """

    options: PlanOptions
    spec: AttentionSpec
    backward: Any
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Comer:
    """A process that offers to serve.

    Attributes:
        number: the number with which the server was started. Its successor may be started with the same number.
        device: "cuda" or "cpu".
        gpu: name of the GPU model, or "cpu".
        process: identity of the process; new after a restart.
        kernel: name of the attention kernel; empty until the server has chosen one.
        gpu_id: identity of the GPU; servers on the same GPU have the same ``gpu_id``. Empty without a GPU.
        arrival: number of the offer among those that came during the run, from 0; -1 for the offers with which the run
            begins. The number tells several offers of one process apart.
    """

    number: int
    machine: str
    device: str
    gpu: str
    process: Process
    kernel: str = ""
    gpu_id: str = ""
    arrival: int = -1


@dataclass(frozen=True)
class KernelTerms:
    """The facts from which a server chooses its kernel.

    Attributes:
        servers: the servers of the first generation. They answer with a :class:`KernelAnswer`.
        kernel: the user's setting of the attention kernel. With "auto" each server takes the fastest correct kernel.
        measures: whether homes will tell each of ``servers``, after its answer, whether to measure a cost table.
    """

    servers: tuple[Comer, ...]
    spec: AttentionSpec
    kernel: str
    measures: bool = False


@dataclass(frozen=True)
class KernelAnswer:
    """A server's answer to :class:`KernelTerms`.

    Attributes:
        kernel: the name of the kernel that the server takes; empty if it takes none.
        objection: the reason why the server takes no kernel, as a sentence; else empty.
    """

    kernel: str
    objection: str = ""


@dataclass(frozen=True)
class Generation:
    """The servers of one generation.

    Attributes:
        servers: the servers, in the order of their ranks in their process groups. In each group homes have the first
            ranks. With tensor-parallel size ``tp``, the servers i · ``tp`` to i · ``tp`` + ``tp`` - 1 have the same
            rank, each in its own process group.
        told: the number of the generation's first message. Rank 0 of the homes numbers all of its messages to servers,
            such as plans (``PoolStore.tell``).
    """

    number: int
    servers: tuple[Comer, ...]
    terms: PoolTerms
    told: int


@dataclass(frozen=True)
class Served:
    """A server's report of one run of a step.

    Attributes:
        seconds: for the keys "forward" and "backward", the seconds of each attention computation in the step.
        peak: peak bytes of GPU memory since the server's last report; on CPUs the process's resident bytes after the
            step.
    """

    seconds: dict[str, list[float]]
    peak: int


def gpu_id(device: torch.device) -> str:
    """Returns the identity of a GPU; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def group_name(generation: int, tp_rank: int) -> str:
    """Returns the name of the process group of the homes with this tensor-parallel rank and their servers."""
    return f"{generation}/part/{tp_rank}"


def check_device(homes: str, own: str, number: int) -> None:
    """Raises SupportError if homes compute on GPUs and this server on a CPU, or the reverse."""
    if homes != own:
        raise SupportError(
            f"Server {number} has device {own}, and the homes compute on {homes}: start all of them on GPUs, "
            "or all on CPUs (CUDA_VISIBLE_DEVICES=)."
        )
