"""A transformer block that runs its layers with disaggregated core attention, in the ping-pong order, and its spec."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
)
from megatron.core.utils import make_viewless_tensor

from distca.device.offload import Offload
from distca.errors import SupportError
from distca.recurrent import CoreParameters, Recurrence, RecurrentKernel
from distca.runtime import AttentionPool, run_layers
from megatron_patches.experts.balance import MicroBatchBalance
from megatron_patches.experts.spec import with_experts
from megatron_patches.layers.full_recompute import differentiable
from megatron_patches.layers.hybrid_layers import GatedAttentionLayer, SplitRecurrentLayer
from megatron_patches.layers.layer import SplitTransformerLayer
from megatron_patches.layers.linear_bias import with_bias
from megatron_patches.layers.packed_attention import PackedAttention
from megatron_patches.layers.rotations import RowRotations
from megatron_patches.model.model_options import MEGATRONS, ModelOptions
from megatron_patches.model.recurrences import has_output_gate, has_recurrent_layers, is_recurrent
from megatron_patches.patches.norms import KeyWidthNorm, QueryWidthNorm, norm_class
from megatron_patches.steps.batch_context import DisaggregatedMicroBatch
from megatron_patches.support.config_fields import check_config, check_recomputation
from megatron_patches.support.layer_spec import check_layer_spec, mlp_submodules


@dataclass(frozen=True)
class _BoundLayer:
    """A split layer with the rotations of the micro-batch's halves, and what its router counts if it has one."""

    layer: SplitTransformerLayer
    rotations: Sequence[RowRotations]
    balance: MicroBatchBalance | None

    @property
    def sink(self) -> torch.Tensor | None:
        return self.layer.self_attention.core_attention.softmax_offset

    def pre(self, hidden: torch.Tensor, nano: int) -> tuple[torch.Tensor, ...]:
        return self.layer.pre(hidden, self.rotations[nano].of(self.layer.layer_number))

    def post(self, o_NHD: torch.Tensor, *residual: torch.Tensor, nano: int) -> torch.Tensor:
        return self.layer.post(o_NHD, *residual, half=None if self.balance is None else self.balance.half(nano))


@dataclass(frozen=True)
class _BoundRecurrentLayer:
    """A split layer with a recurrent core, which has no rotations."""

    layer: SplitRecurrentLayer

    @property
    def recurrence(self) -> Recurrence:
        return self.layer.recurrence

    @property
    def core_kernel(self) -> RecurrentKernel:
        return self.layer.core_kernel

    @property
    def core_parameters(self) -> CoreParameters:
        return self.layer.core_parameters

    def pre(self, hidden: torch.Tensor, nano: int) -> tuple[torch.Tensor, ...]:
        return self.layer.pre(hidden)

    def post(self, o_NHV: torch.Tensor, *residual: torch.Tensor, nano: int) -> torch.Tensor:
        return self.layer.post(o_NHV, *residual)


def _bound(
    layer: SplitTransformerLayer, rotations: Sequence[RowRotations], balance: MicroBatchBalance | None
) -> _BoundLayer | _BoundRecurrentLayer:
    if isinstance(layer, SplitRecurrentLayer):
        return _BoundRecurrentLayer(layer)
    return _BoundLayer(layer, rotations, balance)


class DisaggregatedBlock(TransformerBlock):
    """megatron's block with another forward. GPTModel builds its own block, so :func:`disaggregate_block` turns that
    one into this class after construction."""

    pool: AttentionPool
    recompute_segments: bool
    in_phases = False

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        attention_mask: DisaggregatedMicroBatch,
        rotary_pos_emb: RowRotations | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Run the block.

        Args:
            hidden_states: [rows, 1, hidden], this sequence-parallel rank's share of every nano-batch.
            attention_mask: the micro-batch's routes.
            rotary_pos_emb: of all rows in micro-batch order.
        """
        micro_batch = attention_mask
        if self.config.pipeline_model_parallel_size > 1 and not self.in_phases:
            refuse_other_schedule()
        if not self.pre_process:
            hidden_states = self.input_tensor
        hidden_states = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
        recompute = self.recompute_segments and torch.is_grad_enabled()
        if recompute or self.in_phases:  # in which all stages go back through all layers, frozen ones too
            hidden_states = differentiable(hidden_states)
        assert rotary_pos_emb is not None
        rotations = rotary_pos_emb.halves(micro_batch.nano_rows, micro_batch.chunks)
        halves = hidden_states.split([rows // micro_batch.chunks for rows in micro_batch.nano_rows])
        outputs = run_layers(
            [_bound(layer, rotations, micro_batch.balance) for layer in self.layers],
            halves,
            micro_batch.routes,
            self.pool,
            partial(_checkpoint, self.pool.offload) if recompute else None,
        )
        hidden_states = torch.cat(outputs)
        if self.final_layernorm is not None:
            hidden_states = self.final_layernorm(hidden_states)
        return make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)


def refuse_other_schedule() -> NoReturn:
    """Megatron's own schedules call it on every stage before any of them waits for another, in place of
    ``no_sync_func``.

    Raises:
        SupportError: always.
    """
    raise SupportError(
        "With pipeline stages a disaggregated model was run by another schedule than its own, in which stages would "
        "wait for each other's attention forever; run it with CAD.forward_backward."
    )


def _checkpoint(offload: Offload | None, function: Any, *tensors: torch.Tensor) -> Any:
    with nullcontext() if offload is None else offload.saved_tensors():
        return tensor_parallel.checkpoint(function, False, *tensors)


def disaggregate_block(block: TransformerBlock, pool: AttentionPool, recompute_segments: bool = False) -> None:
    """Turn a block of :class:`SplitTransformerLayer` into a :class:`DisaggregatedBlock`, in place.

    Args:
        block: the block of a GPTModel.
        pool: the server pool.
        recompute_segments: recompute post(i)+pre(i+1) in backward, never core attention.

    Raises:
        SupportError: the block's configuration asks for what is not served.
    """
    check_config(block.config)
    check_recomputation(block.config, recompute_segments)
    assert all(isinstance(layer, SplitTransformerLayer) for layer in block.layers)
    block.__class__ = DisaggregatedBlock
    block.pool, block.recompute_segments = pool, recompute_segments  # type: ignore[attr-defined]


def block_spec(
    config: TransformerConfig,
    layer: ModuleSpec | None = None,
    *,
    options: ModelOptions = MEGATRONS,
    disaggregate: bool = True,
    te: bool = False,
) -> TransformerBlockSubmodules:
    """Megatron's local spec with norms that know sequence parallelism and core attention that knows documents.

    Args:
        config: of the model.
        layer: Megatron's spec of a dense layer, the local one or Transformer Engine's; None takes the local one of the
            configuration.
        options: of the model.
        disaggregate: layers that are cut at core attention; False leaves Megatron's own, unless they do not know the
            options.
        te: Transformer Engine's linear layers in place of Megatron's. Norms stay apart from them in either case.

    Raises:
        SupportError: a spec of other layers.
    """
    local = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    layer = layer or local
    check_layer_spec(layer)
    layer = deepcopy(layer)
    if disaggregate or options.own_layers or config.num_moe_experts:
        layer.module = GatedAttentionLayer if has_output_gate(config) else SplitTransformerLayer
        layer.params = {**layer.params, "options": options}
    parts = layer.submodules
    norm = norm_class(config, options.norm_bias)
    parts.input_layernorm = IdentityOp if options.norms == "post" else norm
    parts.pre_mlp_layernorm = IdentityOp if options.norms == "post" or options.parallel_mlp else norm
    # Checkpoints name norms as if they were in the linear layers.
    parts.sharded_state_dict_keys_map = local.submodules.sharded_state_dict_keys_map
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        both = (QueryWidthNorm, KeyWidthNorm) if options.query_key_norm == "width" else (norm, norm)
        attention.q_layernorm, attention.k_layernorm = both
    column, row = _linears(te)
    mlp = mlp_submodules(parts.mlp)
    attention.linear_qkv = column
    attention.linear_proj = with_bias(row) if options.attention_output_bias else row
    mlp.linear_fc1, mlp.linear_fc2 = (with_bias(each) if options.mlp_bias else each for each in (column, row))
    if has_recurrent_layers(config):
        from megatron_patches.layers.gated_delta_net import recurrent_layer_spec

        recurrent, numbers = recurrent_layer_spec(layer, column, row, norm), range(1, config.num_layers + 1)
        layers = [recurrent if is_recurrent(config, number) else layer for number in numbers]
        return TransformerBlockSubmodules(layers, norm)
    return TransformerBlockSubmodules(with_experts(layer, config), norm)


def _linears(te: bool) -> tuple[type, type]:
    """Linear layers that are split over tensor-parallel ranks by outputs, and by inputs."""
    if te:
        from megatron_patches.te.linears import ColumnLinear, RowLinear

        return ColumnLinear, RowLinear
    return tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear
