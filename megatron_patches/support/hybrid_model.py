"""Checks a built HybridModel: constructor arguments, configuration, process groups, and classes of modules."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from distca.errors import SupportError
from megatron_patches.experts.spec import DrawnExperts
from megatron_patches.layers.gated_delta_net import OwnGatedDeltaNet
from megatron_patches.layers.hybrid_layers import GatedAttentionLayer, SplitRecurrentLayer
from megatron_patches.layers.hybrid_stack import DisaggregatedStack
from megatron_patches.layers.layer import SplitTransformerLayer
from megatron_patches.layers.mamba import GroupedGatedNorm, OwnMambaMixer, SplitMambaLayer
from megatron_patches.layers.packed_attention import PackedAttention
from megatron_patches.model.model_options import ModelOptions
from megatron_patches.model.pattern import ATTENTION, DELTA_NET, EXPERTS, MAMBA, STAGE
from megatron_patches.model.pattern import MLP as MLP_ALONE
from megatron_patches.model.recurrences import has_output_gate
from megatron_patches.patches.norms import PlainRMSNorm, norm_class
from megatron_patches.patches.position_rotary import PositionRotary
from megatron_patches.support.built_model import (
    ARGUMENTS,
    argument_of,
    check_head_norms,
    check_model_groups,
    check_options,
    expect,
    linears_like,
)
from megatron_patches.support.config_fields import LIMITS, check_config
from megatron_patches.support.limits import Limit, check_limit

_ARGUMENTS = {name: limit for name, limit in ARGUMENTS.items() if name != "mtp_block_spec"} | {
    "position_embedding_type": Limit("only RoPE or no positions are supported", ("rope", "none")),
}
"""Arguments of HybridModel of which not all values are supported."""
_FIRST_LINEAR = {
    ATTENTION: "self_attention.linear_qkv",
    DELTA_NET: "self_attention.in_proj",
    MAMBA: "mixer.in_proj",
    MLP_ALONE: "mlp.linear_fc1",
}
"""The path of a layer's first linear layer, by the layer's symbol in the pattern."""


def check_hybrid_model(model: Any, pattern: str, options: ModelOptions) -> None:
    """Refuses a HybridModel that is not supported, or differs from what the user told this project about it.

    Args:
        model: the model as it was built. Only its rotary embedding may have been replaced, by a PositionRotary.
        pattern: the ``hybrid_layer_pattern`` that the user gave to :class:`megatron_patches.api.CAD`.
        options: the ``model_options`` that the user gave to CAD.

    Raises:
        SupportError: the pattern differs, or the configuration, an argument, a group or a module is not supported.
    """
    if model.hybrid_layer_pattern != pattern:
        raise SupportError(
            f"The model was built with hybrid_layer_pattern {model.hybrid_layer_pattern!r}, but CAD was made with "
            f"{pattern!r}: give both the same pattern."
        )
    check_config(model.config)
    for name, limit in _ARGUMENTS.items():
        check_limit(name, argument_of(model, name), limit)
    check_model_groups(model)
    if model.position_embedding_type == "rope" and not isinstance(model.rotary_pos_emb, PositionRotary):
        expect("rotary_pos_emb", type(model.rotary_pos_emb), RotaryEmbedding)
    expect("decoder", type(model.decoder), DisaggregatedStack)
    if model.post_process:
        expect("decoder.final_norm", type(model.decoder.final_norm), norm_class(model.config))
        expect("output_layer", type(model.output_layer), ColumnParallelLinear)
    here = pattern.split(STAGE)[parallel_state.get_pipeline_model_parallel_rank()]
    for number, (symbol, layer) in enumerate(zip(here, model.decoder.layers, strict=True)):
        _check_layer(f"decoder.layers.{number}", symbol, layer, model.config, options)


def _check_layer(path: str, symbol: str, layer: Any, config: Any, options: ModelOptions) -> None:
    attention = GatedAttentionLayer if has_output_gate(config) else SplitTransformerLayer
    classes = {ATTENTION: attention, DELTA_NET: SplitRecurrentLayer, MAMBA: SplitMambaLayer}
    expect(path, type(layer), classes.get(symbol, SplitTransformerLayer))
    for name, kind in _parts_of(symbol, layer, config, options).items():
        expect(f"{path}.{name}", type(layer.get_submodule(name)), kind)
    check_options(path, layer, options)
    if symbol == ATTENTION:
        check_head_norms(path, layer.self_attention, config, options)
    if any(getattr(part, "config", config) is not config for part in (layer, *layer.children())):
        raise SupportError(f"{path} has a configuration of its own, but {LIMITS['heterogeneous_block_specs'].because}.")


def _parts_of(symbol: str, layer: Any, config: Any, options: ModelOptions) -> dict[str, Any]:
    """Returns the class that each part of a layer must have, by path."""
    norm = norm_class(config)
    column, row = linears_like(layer.get_submodule(_FIRST_LINEAR[symbol]) if symbol in _FIRST_LINEAR else None)
    if symbol == ATTENTION:
        return {
            "input_layernorm": norm,
            "self_attention": SelfAttention,
            "self_attention.core_attention": PackedAttention,
            "self_attention.linear_qkv": column,
            "self_attention.linear_proj": row,
            "mlp": IdentityOp,
        }
    if symbol == DELTA_NET:
        return {
            "input_layernorm": norm,
            "self_attention": OwnGatedDeltaNet,
            "self_attention.in_proj": column,
            "self_attention.out_norm": PlainRMSNorm if options.plain_recurrent_norm else norm,
            "self_attention.out_proj": row,
            "mlp": IdentityOp,
        }
    if symbol == MAMBA:
        return {
            "norm": norm,
            "mixer": OwnMambaMixer,
            "mixer.in_proj": column,
            "mixer.norm": GroupedGatedNorm,
            "mixer.out_proj": row,
        }
    without_mixer = {"self_attention": IdentityOp, "pre_mlp_layernorm": norm}
    if symbol == MLP_ALONE:
        return {**without_mixer, "mlp": MLP, "mlp.linear_fc1": column, "mlp.linear_fc2": row}
    assert symbol == EXPERTS
    shared = config.moe_shared_expert_intermediate_size is not None
    return {
        **without_mixer,
        "mlp": MoELayer,
        "mlp.router": TopKRouter,
        "mlp.experts": DrawnExperts,
        **({"mlp.shared_experts": SharedExpertMLP} if shared else {}),
    }
