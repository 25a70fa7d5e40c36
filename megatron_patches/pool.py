"""Makes a rank's :class:`AttentionPool`: an attention kernel, and a transport to ranks that compute attention."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core.transformer import TransformerConfig

from distca.attention import AttentionSpec, choose_kernel
from distca.device.offload import Offload
from distca.plan.metrics import receive_buffer_gb
from distca.recurrent import choose_recurrent_kernel
from distca.runtime import AttentionPool
from distca.runtime.timeline import Timeline
from distca.transport import Transport, choose_transport
from distca.transport.collective import CollectiveTransport
from megatron_patches.arguments import CadArguments, How
from megatron_patches.model.layer_kinds import LayerKinds
from megatron_patches.ranks.groups import server_pool_group
from megatron_patches.ranks.remote_servers import RemoteServers
from megatron_patches.steps.cost_models import attention_shape


def join_pool(
    config: TransformerConfig,
    layer_kinds: LayerKinds,
    device: torch.device,
    given: CadArguments,
    how: How,
    remote: RemoteServers | None = None,
) -> AttentionPool:
    """Returns this rank's attention kernel and its transport of q, k, v and outputs; all ranks call this together.

    Args:
        how: "keep" if the rank that computes attention keeps q, k and v for backward; "resend" if they travel again.
        remote: processes without a model that compute attention too, if there are any.

    Raises:
        KernelError: the kernel cannot run on a rank or a process of ``remote``, or gives wrong results there.
        TransportError: the transport cannot be used.
        LaunchError: a process of ``remote`` gives no answer.
        SupportError: the model has recurrent layers, and no kernel for them can run here with right results; or
            ``given.deterministic`` is True on a GPU, where no kernel for recurrent layers is deterministic.
    """
    spec = attention_spec(config, layer_kinds, device, given)
    if remote is not None:
        folder = Path(given.cost_table) if given.cost_table and Path(given.cost_table).is_dir() else None
        remote.ask_for_kernels(spec, given.kernel, folder)
    # This compiles the kernel now, because during a step other ranks would wait for the compilation.
    kernel = choose_kernel(given.kernel, spec)
    if remote is not None:
        remote.hear_kernels()
    # All ranks test the kernels of recurrent layers here together. Layers ask for a kernel again in the first step, and
    # get the one that was chosen here.
    for recurrence in dict.fromkeys(filter(None, layer_kinds.recurrences)):
        choose_recurrent_kernel(recurrence, device, config.params_dtype, given.deterministic)
    sinks = any(kind.sink for kind in layer_kinds.kinds)
    needed = receive_buffer_gb(attention_shape(config), given.tokens_per_rank, resend=how == "resend", sinks=sinks)
    transport: Transport
    between_models = None
    if remote is not None:
        transport = remote.transport
        if any(layer_kinds.recurrences):
            # Recurrent layers exchange rows only among ranks with a model.
            between_models = CollectiveTransport(server_pool_group())
    else:
        buffer_gb, waits = given.nvshmem_buffer_gb or needed, not given.ping_pong
        buffer_gb = buffer_gb if given.disaggregate else 0
        transport = choose_transport(given.transport, server_pool_group(), buffer_gb, waits_at_once=waits)
    parking = Offload(device) if given.offload else None
    return AttentionPool(transport, kernel, Timeline(device), how, parking, between_models)


def attention_spec(
    config: TransformerConfig, layer_kinds: LayerKinds, device: torch.device, given: CadArguments
) -> AttentionSpec:
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
