"""Joining the server pool: this rank's kernel, its transport, and where backward's rows are kept."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig

from distca.attention import AttentionSpec, choose_kernel
from distca.device.offload import Offload
from distca.plan.metrics import receive_buffer_gb
from distca.recurrent import choose_recurrent_kernel
from distca.runtime import AttentionPool
from distca.runtime.timeline import Timeline
from distca.transport import Transport, choose_transport
from megatron_patches.arguments import CadArguments, How
from megatron_patches.model.layer_kinds import LayerKinds
from megatron_patches.ranks.groups import server_pool_group
from megatron_patches.ranks.remote_servers import RemoteServers
from megatron_patches.steps.plan_options import attention_shape


def join_pool(
    config: TransformerConfig,
    layer_kinds: LayerKinds,
    device: torch.device,
    given: CadArguments,
    how: How,
    remote: RemoteServers | None = None,
) -> AttentionPool:
    """Returns the server pool as this rank sees it; all ranks call it together.

    Args:
        config: Megatron's configuration.
        layer_kinds: the kinds of its layers.
        device: this rank's device.
        given: how core attention is to be computed.
        how: the way in which backward gets its rows, keep or resend.
        remote: the servers without a model; None for none.

    Raises:
        KernelError, TransportError: the kernel or transport that was asked for cannot run here, or is wrong here.
        SupportError: there are recurrent layers, and no kernel of theirs is right here.
    """
    spec = attention_spec(config, layer_kinds, device, given)
    # Kernels compile at first use: this happens now, and not while other ranks wait for rows.
    kernel = choose_kernel(given.kernel, spec)
    for recurrence in dict.fromkeys(filter(None, layer_kinds.recurrences)):
        choose_recurrent_kernel(recurrence, device, config.params_dtype, given.deterministic)
    sinks = any(kind.sink for kind in layer_kinds.kinds)
    needed = receive_buffer_gb(attention_shape(config), given.tokens_per_rank, resend=how == "resend", sinks=sinks)
    transport: Transport
    if remote is not None:
        transport = remote.transport
    else:
        transport = choose_transport(given.transport, server_pool_group(), given.nvshmem_buffer_gb or needed)
    parking = Offload(device) if given.offload else None
    return AttentionPool(transport, kernel, Timeline(device), how, parking)


def attention_spec(
    config: TransformerConfig, layer_kinds: LayerKinds, device: torch.device, given: CadArguments
) -> AttentionSpec:
    """Returns the core attention of this tensor-parallel rank's heads, by which kernels are chosen and checked."""
    shape = attention_shape(config)
    return AttentionSpec(
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        config.params_dtype,
        device,
        kinds=layer_kinds.kinds,
        deterministic=given.deterministic,
        value_dim=shape.value_dim,
    )
