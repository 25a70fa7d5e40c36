"""Refuses settings that are not supported with multi-head latent attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.transformer import TransformerConfig

from distca.errors import SupportError
from megatron_patches.arguments import CadArguments
from megatron_patches.model.latent import is_latent, latent_dims
from megatron_patches.model.model_options import MEGATRONS
from megatron_patches.versions import has_gated_delta_net, installed_version


def check_latent(config: TransformerConfig, given: CadArguments) -> None:
    """Raises SupportError if a setting is not supported with latent attention, or if a model without latent attention
    has ``latent_norm_epsilon``."""
    epsilon = given.model_options.latent_norm_epsilon
    if not is_latent(config):
        if epsilon:
            raise SupportError(
                f"`latent_norm_epsilon` is {epsilon}, but the model has no latent attention: leave it out."
            )
        return
    for what, found in _refused(config, given).items():
        if found:
            raise SupportError(
                f"multi_latent_attention is True, which is not supported where {what}, or do without latent attention."
            )


def _refused(config: Any, given: CadArguments) -> dict[str, bool]:
    """Returns whether each unsupported setting is present, under the text for the message."""
    heads, tp = config.num_attention_heads, config.tensor_model_parallel_size
    if not hasattr(config, "v_head_dim"):
        return {f"the configuration is a {type(config).__name__}: make an MLATransformerConfig": True}
    key_dim, value_dim = latent_dims(config)
    return {
        # has_gated_delta_net: whether megatron-core is 0.19 or newer.
        f"megatron-core is {installed_version()}: install 0.19": not has_gated_delta_net(),
        f"sequence_parallel is False with tensor_model_parallel_size {tp}: set sequence_parallel to True": (
            tp > 1 and not config.sequence_parallel
        ),
        f"fp8 is {config.fp8!r}, as such models have Megatron-Core's own linear layers, which do not compute in FP8: "
        "set fp8 to None": config.fp8 is not None,
        "`model_options` has more than latent_norm_epsilon: leave the rest out": (
            replace(given.model_options, latent_norm_epsilon=0.0) != MEGATRONS
        ),
        f"hybrid_layer_pattern is {given.hybrid_layer_pattern!r}: leave it out": bool(given.hybrid_layer_pattern),
        f"num_query_groups is {config.num_query_groups}: set it to num_attention_heads, {heads}": (
            config.num_query_groups != heads
        ),
        f"v_head_dim is {value_dim}: set it to at most qk_head_dim + qk_pos_emb_head_dim, {key_dim}": (
            value_dim > key_dim
        ),
        f"qk_pos_emb_head_dim is {config.qk_pos_emb_head_dim}, of which pairs are rotated: set it to an even number": (
            config.qk_pos_emb_head_dim % 2 == 1
        ),
        "experimental_attention_variant is set: set it to None": config.experimental_attention_variant is not None,
        "window_size is set: set it to None": config.window_size is not None,
        "softmax_type is 'learnable': set it to 'vanilla'": config.softmax_type == "learnable",
        "softmax_scale is set, which Megatron would ignore: set it to None": config.softmax_scale is not None,
        "no_rope_freq is set, which Megatron would ignore: set it to None": bool(config.no_rope_freq),
        "apply_rope_fusion is True: set it to False": config.apply_rope_fusion,
        f"rope_type is {config.rope_type!r}: set it to 'rope' or 'yarn'": config.rope_type not in ("rope", "yarn"),
    }
