"""Megatron's transformer block with another forward, in which ranks compute core attention for each other.

The *core* of a layer is softmax(QKᵀ)V, or the recurrence in its place. Each rank computes the recurrence of its own
rows; ranks send each other what the recurrence needs of earlier rows. A micro-batch may be split into two
*nano-batches*: one is computed while the transfers of the other's cores run.

A training script builds its model with the spec from ``distca.CAD.block_spec``. With disaggregation
``CAD.attach`` then gives a GPTModel's block the new forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import cache, partial
from typing import Any, NoReturn

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import make_viewless_tensor

from distca.device.offload import Offload
from distca.errors import SupportError
from distca.runtime import AttentionPool, run_layers
from megatron_patches.experts.spec import with_experts
from megatron_patches.layers.full_recompute import differentiable
from megatron_patches.layers.hybrid_layers import GatedAttentionLayer
from megatron_patches.layers.latent import LatentLayer
from megatron_patches.layers.latent_attention import LatentAttention, ReplicatedLinear, WholeRows
from megatron_patches.layers.layer import SplitLayerParts, SplitTransformerLayer
from megatron_patches.layers.packed_attention import PackedAttention
from megatron_patches.layers.rotations import RowRotations
from megatron_patches.layers.units import bound_units
from megatron_patches.model.latent import is_latent
from megatron_patches.model.model_options import MEGATRONS, ModelOptions
from megatron_patches.model.recurrences import has_output_gate, has_recurrent_layers, is_recurrent
from megatron_patches.patches.norms import KeyWidthNorm, QueryWidthNorm, norm_class
from megatron_patches.steps.batch_context import DisaggregatedMicroBatch
from megatron_patches.support.config_fields import check_config, check_recomputation
from megatron_patches.support.layer_spec import check_layer_spec, mlp_submodules


class DisaggregatedForward(MegatronModule):
    """The forward that a GPTModel's block and a HybridModel's stack share.

    Attributes:
        pool: the kernel of core attention, and the transport that moves rows between ranks.
        recompute_segments: whether backward recomputes everything but cores; with ``disaggregate=False`` cores too.
        has_servers: whether servers without a model compute core attention too.
        in_phases: whether this project's pipeline schedule runs the model. In that schedule all stages run forward at
            the same time, then all run backward. The i-th layers of all stages run together.
    """

    pool: AttentionPool
    pre_process: bool
    input_tensor: torch.Tensor
    layers: Any
    recompute_segments: bool
    has_servers: bool
    in_phases = False

    @property
    def last_norm(self) -> torch.nn.Module | None:
        """The norm after the model's last layer; None on all stages but the last."""
        raise NotImplementedError

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        attention_mask: DisaggregatedMicroBatch,
        rotary_pos_emb: RowRotations | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Runs all layers of this pipeline stage, and ``last_norm``; returns [rows, 1, hidden].

        Args:
            hidden_states: [rows, 1, hidden]; with sequence parallelism this rank's part of every nano-batch.
            attention_mask: the micro-batch in place of a mask. It says which rows each layer sends and receives.
            rotary_pos_emb: RoPE's rotations of all rows.
        """
        micro_batch = attention_mask
        if self.config.pipeline_model_parallel_size > 1 and not self.in_phases:
            refuse_other_schedule()
        if not self.pre_process:
            hidden_states = self.input_tensor
        hidden_states = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
        recompute = self.recompute_segments and torch.is_grad_enabled()
        # With ``in_phases`` ranks of all stages compute attention for each other in backward too, and servers take part
        # in backward of all layers. If this rank's backward stopped at frozen layers, the others would wait for it.
        if recompute or self.in_phases or self.has_servers:
            hidden_states = differentiable(hidden_states)
        assert rotary_pos_emb is not None
        rotations = rotary_pos_emb.of_nano_batches(micro_batch.nano_rows, micro_batch.chunks)
        nano_batches = _split(hidden_states, [rows // micro_batch.chunks for rows in micro_batch.nano_rows])
        outputs = run_layers(
            bound_units(self.layers, rotations, micro_batch.balance),
            nano_batches,
            micro_batch.routes,
            self.pool,
            partial(_checkpoint, self.pool.offload) if recompute else None,
        )
        hidden_states = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if self.last_norm is not None:
            hidden_states = self.last_norm(hidden_states)
        return make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)


class DisaggregatedBlock(DisaggregatedForward, TransformerBlock):
    """The class to which :func:`disaggregate_block` changes the TransformerBlock that a GPTModel has built."""

    @property
    def last_norm(self) -> torch.nn.Module | None:
        norm: torch.nn.Module | None = self.final_layernorm
        return norm


def _split(hidden: torch.Tensor, rows: Sequence[int]) -> Sequence[torch.Tensor]:
    """Returns each nano-batch's rows. With one nano-batch nothing is split, as backward of ``split`` copies rows."""
    return (hidden,) if len(rows) == 1 else hidden.split(list(rows))


def refuse_other_schedule() -> NoReturn:
    """Raises SupportError: in Megatron's own pipeline schedules stages would wait for each other's attention forever.

    ``distca.CAD`` sets this function as ``no_sync_func``, which those schedules call before any stage waits.
    """
    raise SupportError(
        "A disaggregated model with pipeline stages was run by another schedule than its own. There stages would wait "
        "for each other's attention forever: run the model with CAD.forward_backward."
    )


def _checkpoint(offload: Offload | None, function: Any, *tensors: torch.Tensor) -> Any:
    """Returns ``function(*tensors)``, which backward computes again.

    Until then ``offload``, if not None, keeps ``tensors`` in host memory.
    """
    with nullcontext() if offload is None else offload.saved_tensors():
        return tensor_parallel.checkpoint(function, False, *tensors)


def disaggregate_block(
    block: Any, pool: AttentionPool, recompute_segments: bool = False, has_servers: bool = False
) -> None:
    """Gives a GPTModel's block the forward of :class:`DisaggregatedForward`, with the attributes that are given here.

    A HybridModel's stack already has that forward, so it only gets the attributes.

    Raises:
        SupportError: a field of the block's configuration is not supported.
    """
    check_config(block.config)
    check_recomputation(block.config, recompute_segments)
    assert all(isinstance(layer, SplitLayerParts) for layer in block.layers)
    if not isinstance(block, DisaggregatedForward):
        block.__class__ = DisaggregatedBlock
    block.pool, block.recompute_segments, block.has_servers = pool, recompute_segments, has_servers


def block_spec(
    config: TransformerConfig,
    layer: ModuleSpec | None = None,
    *,
    options: ModelOptions = MEGATRONS,
    disaggregate: bool = True,
    te: bool = False,
) -> TransformerBlockSubmodules:
    """Returns the spec of a GPTModel's layers on this pipeline stage, with classes of this project.

    Args:
        layer: Megatron's spec of a layer with an MLP, local or with Transformer Engine. None takes the local spec.
        options: settings of the model for which ``config`` has no field.
        disaggregate: False keeps Megatron's own layers, unless ``options``, experts, latent attention or a recurrence
            need others.
        te: whether linear layers are Transformer Engine's.

    Raises:
        SupportError: ``layer`` has a class or mask that is not supported; or ``layer`` is given for a model with latent
            attention.
    """
    norm = norm_class(config, options.norm_bias)
    layer = layer_spec(config, layer, options=options, disaggregate=disaggregate, te=te)
    if has_recurrent_layers(config):
        from megatron_patches.layers.gated_delta_net import recurrent_layer_spec

        recurrent, before = recurrent_layer_spec(layer, *linear_classes(te), norm), get_transformer_layer_offset(config)
        numbers = range(before + 1, before + get_num_layers_to_build(config) + 1)
        layers = [recurrent if is_recurrent(config, number) else layer for number in numbers]
        return TransformerBlockSubmodules(layers, norm)
    return TransformerBlockSubmodules(with_experts(layer, config), norm)


def layer_spec(
    config: TransformerConfig,
    layer: ModuleSpec | None = None,
    *,
    options: ModelOptions = MEGATRONS,
    disaggregate: bool = True,
    te: bool = False,
) -> ModuleSpec:
    """Returns the spec of one layer; arguments and errors are those of :func:`block_spec`."""
    local = get_gpt_layer_local_spec(
        normalization=config.normalization,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )
    layer = layer or local
    if is_latent(config):
        if layer is not local:
            raise SupportError("With multi_latent_attention the layer spec is Megatron's local one: leave `layer` out.")
        return _latent_spec(config, deepcopy(local), options, te)
    check_layer_spec(layer)
    layer = deepcopy(layer)
    if disaggregate or options.own_layers or config.num_moe_experts:
        layer.module = GatedAttentionLayer if has_output_gate(config) else SplitTransformerLayer
        layer.params = {**layer.params, "options": options}
    parts = layer.submodules
    norm = norm_class(config, options.norm_bias)
    parts.input_layernorm = IdentityOp if options.norms == "post" else norm
    parts.pre_mlp_layernorm = IdentityOp if options.norms == "post" or options.parallel_mlp else norm
    # Checkpoints must name a norm after the linear layer that reads its output, as with Transformer Engine.
    parts.sharded_state_dict_keys_map = local.submodules.sharded_state_dict_keys_map
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        both = (QueryWidthNorm, KeyWidthNorm) if options.query_key_norm == "width" else (norm, norm)
        attention.q_layernorm, attention.k_layernorm = both
    column, row = linear_classes(te)
    mlp = mlp_submodules(parts.mlp)
    attention.linear_qkv = column
    attention.linear_proj = with_bias(row) if options.attention_output_bias else row
    mlp.linear_fc1, mlp.linear_fc2 = (with_bias(each) if options.mlp_bias else each for each in (column, row))
    return layer


def _latent_spec(config: TransformerConfig, layer: ModuleSpec, options: ModelOptions, te: bool) -> ModuleSpec:
    norm, parts = norm_class(config, options.norm_bias), layer.submodules
    layer.module, layer.params = LatentLayer, {**layer.params, "options": options}
    parts.input_layernorm = parts.pre_mlp_layernorm = norm
    parts.self_attention.module = LatentAttention
    epsilon = options.latent_norm_epsilon or config.layernorm_epsilon
    parts.self_attention.params = {**parts.self_attention.params, "norm_epsilon": epsilon}
    attention, mlp = parts.self_attention.submodules, mlp_submodules(parts.mlp)
    column, row = linear_classes(te)
    attention.core_attention = PackedAttention
    attention.q_layernorm = attention.kv_layernorm = norm if config.qk_layernorm else WholeRows
    attention.linear_q_down_proj = attention.linear_kv_down_proj = ReplicatedLinear
    attention.linear_q_proj = attention.linear_q_up_proj = attention.linear_kv_up_proj = column
    attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2 = row, column, row
    return layer


def linear_classes(te: bool) -> tuple[type, type]:
    """Returns the classes of column-parallel and row-parallel linear layers."""
    if te:
        from megatron_patches.te.linears import ColumnLinear, RowLinear

        return ColumnLinear, RowLinear
    return tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear


@cache
def with_bias(linear: type) -> type:

    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        linear.__init__(self, *arguments, **{**named, "bias": True})  # type: ignore[misc]

    return type(f"{linear.__name__}WithBias", (linear,), {"__init__": __init__, "__module__": linear.__module__})
