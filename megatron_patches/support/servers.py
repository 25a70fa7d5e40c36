"""Refuses what does not go together with servers without a model, which are processes that only compute attention.

``ServerMembers`` calls :func:`check_gpus` at the start, and ``LateServers`` calls it when further servers come later.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron.core.transformer import TransformerConfig

from distca.errors import SupportError
from distca.runtime.pool_messages import Comer


def check_with_servers(config: TransformerConfig, offload: bool) -> None:
    """Refuses models and settings that are not supported beside servers without a model.

    Raises:
        SupportError: inputs of layers are offloaded, or there is FP8 with delayed scaling.
    """
    found = {
        "offload": offload,
        # A step runs again if a server leaves during it. Delayed scaling would count the largest values of both runs.
        "FP8 with delayed scaling": bool(config.fp8) and config.fp8_recipe == "delayed",
    }
    for what, there in found.items():
        if there:
            raise SupportError(
                f"Servers without a model have not been shown to be right with {what}: leave `servers` at 0."
            )


def check_gpus(servers: Sequence[Comer], tp: int, of_homes: Collection[str] = ()) -> None:
    """Refuses a server on a home's GPU, and two servers on one GPU that serve the same tensor-parallel rank.

    Args:
        servers: all servers in the pool's order; ``servers[i]`` serves tensor-parallel rank i % ``tp``.
        tp: number of tensor-parallel ranks.
        of_homes: identities of the homes' GPUs; "" for a CPU.

    Raises:
        SupportError: a server is refused; the message names it.
    """
    for tp_rank in range(tp):
        first: dict[str, int] = {}
        for each in servers[tp_rank::tp]:
            if each.gpu_id and each.gpu_id in of_homes:
                raise SupportError(
                    f"Server {each.number} of the pool is on the GPU of a rank with a model: start it on another GPU "
                    "(LOCAL_RANK, CUDA_VISIBLE_DEVICES)."
                )
            if each.gpu_id and first.setdefault(each.gpu_id, each.number) != each.number:
                raise SupportError(
                    f"Servers {first[each.gpu_id]} and {each.number} of the pool share a GPU and serve the same "
                    "tensor-parallel rank, but NCCL takes one process of a group on each GPU: start each on its own."
                )
