"""The spec of a block whose core attention is disaggregated, or computed at home on packed documents."""

from __future__ import annotations

from copy import deepcopy

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from megatron_patches import support
from megatron_patches.layer import SplitTransformerLayer
from megatron_patches.packed_attention import PackedAttention
from megatron_patches.patches.rms_norm import RMSNorm


def block_spec(
    config: TransformerConfig, layer: ModuleSpec | None = None, *, disaggregate: bool = True
) -> TransformerBlockSubmodules:
    """Megatron's local spec with norms that know sequence parallelism and core attention that knows documents.

    Args:
        config: of the model.
        layer: Megatron's local spec of a dense layer; None takes that of the configuration.
        disaggregate: layers that are cut at core attention; False leaves Megatron's own.

    Raises:
        SupportError: a spec of other layers.
    """
    if layer is None:
        layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    support.check_layer_spec(layer)
    layer = deepcopy(layer)
    if disaggregate:
        layer.module = SplitTransformerLayer
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules([layer] * get_num_layers_to_build(config), RMSNorm)
