"""The stack of layers of Megatron-Core's HybridModel, changed so that other ranks may compute core attention.

Each layer of a HybridModel is either a *mixer* (attention, a gated delta net or Mamba), or an MLP or experts. The
*core* of a mixer is softmax(QKᵀ)V or the recurrence. A *unit* is a mixer with the MLPs and experts behind it.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp

from megatron_patches.experts.spec import experts_spec
from megatron_patches.layers.block import DisaggregatedForward, layer_spec, linear_classes
from megatron_patches.layers.full_recompute import differentiable
from megatron_patches.layers.gated_delta_net import recurrent_layer_spec
from megatron_patches.layers.layer import SplitTransformerLayer
from megatron_patches.layers.mamba import OwnMambaMixer, SplitMambaLayer
from megatron_patches.layers.rotations import RowRotations
from megatron_patches.layers.units import BoundRecurrentUnit, bound_units
from megatron_patches.model.model_options import MEGATRONS, ModelOptions
from megatron_patches.patches.norms import PlainRMSNorm, norm_class
from megatron_patches.steps.batch_context import PackedMicroBatch


class DisaggregatedStack(DisaggregatedForward, HybridStack):
    """Megatron's stack with the forward of :class:`DisaggregatedForward`.

    Megatron's norm behind the last layer needs Transformer Engine, so the constructor builds this project's norm.
    """

    def __init__(self, config: TransformerConfig, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **{**named, "post_layer_norm": False})
        if self.post_process:
            self.final_norm = norm_class(config)(config, config.hidden_size, config.layernorm_epsilon)

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, attention_mask: Any, rotary_pos_emb: RowRotations | None = None, **_: Any
    ) -> torch.Tensor:
        """Runs all layers of this pipeline stage; returns [rows, 1, hidden].

        Args:
            hidden_states: [rows, 1, hidden]; with sequence parallelism this rank's part of the rows.
            attention_mask: the micro-batch in place of a mask. With a :class:`PackedMicroBatch` this rank computes all
                cores of its rows itself, and if ``recompute_segments`` is True, backward recomputes cores too. With
                another class, other ranks may compute core attention, and backward recomputes no core.
        """
        if not isinstance(attention_mask, PackedMicroBatch):
            return super().forward(hidden_states, attention_mask, rotary_pos_emb)
        assert rotary_pos_emb is not None
        recompute = self.recompute_segments and torch.is_grad_enabled()
        if recompute:
            hidden_states = differentiable(hidden_states)
        for unit in bound_units(self.layers, [rotary_pos_emb], attention_mask.balance):
            run = partial(self._run_unit, unit, attention_mask)
            hidden_states = tensor_parallel.checkpoint(run, False, hidden_states) if recompute else run(hidden_states)
        return hidden_states if self.last_norm is None else self.last_norm(hidden_states)

    def _run_unit(self, unit: Any, micro_batch: PackedMicroBatch, hidden: torch.Tensor) -> torch.Tensor:
        if isinstance(unit, BoundRecurrentUnit):
            *residual, mixed, g, beta = unit.pre(hidden, 0)
            layer = unit.unit.mixer.layer_number - 1  # as ``PackedAttention`` counts layers in the timeline
            o = micro_batch.recur(self.pool, layer, unit.recurrence, unit.core_parameters, mixed, g, beta)
        else:
            *residual, q_NHD, kv_N2GD = unit.pre(hidden, 0)
            q, k, v = (x[:, None] for x in (q_NHD, *kv_N2GD.unbind(1)))
            o = unit.unit.mixer.self_attention.core_attention(q, k, v, micro_batch)
        output: torch.Tensor = unit.post(o, *residual, nano=0)
        return output

    @property
    def last_norm(self) -> torch.nn.Module | None:
        norm: torch.nn.Module | None = self.final_norm if self.post_process else None
        return norm


def hybrid_stack_spec(config: TransformerConfig, *, options: ModelOptions = MEGATRONS, te: bool = False) -> ModuleSpec:
    """Returns the spec of a HybridModel's stack. If ``te`` is True, linear layers are Transformer Engine's."""
    norm, (column, row) = norm_class(config), linear_classes(te)
    layer = layer_spec(config, options=options, te=te)
    # All layers but Mamba's are made from the spec of a layer with attention and an MLP. A layer with an MLP alone
    # keeps ``self_attn_bda``: with it the layer first adds the output of the layer before it to the residual.
    attention, mlp = deepcopy(layer), deepcopy(layer)
    attention.submodules.pre_mlp_layernorm = attention.submodules.mlp = IdentityOp
    mlp.module = SplitTransformerLayer
    mlp.submodules.input_layernorm = mlp.submodules.self_attention = IdentityOp
    experts = deepcopy(mlp)
    if config.num_moe_experts:
        experts.submodules.mlp = experts_spec(config)
    mamba = ModuleSpec(
        module=SplitMambaLayer,
        params={"options": options},
        submodules=MambaLayerSubmodules(
            norm=norm,
            mixer=ModuleSpec(module=OwnMambaMixer, submodules=MambaMixerSubmodules(in_proj=column, out_proj=row)),
            mamba_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
        ),
    )
    return ModuleSpec(
        module=DisaggregatedStack,
        submodules=HybridStackSubmodules(
            mamba_layer=mamba,
            gdn_layer=recurrent_layer_spec(
                attention, column, row, PlainRMSNorm if options.plain_recurrent_norm else norm
            ),
            attention_layer=attention,
            mlp_layer=mlp,
            moe_layer=experts,
        ),
    )
