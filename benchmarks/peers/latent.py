"""Megatron-Core's latent attention by Transformer Engine's layers: its configuration and the spec of its layers.

Packed values are padded to the width of keys by Megatron itself, as its kernels and its ring of keys and values take
either.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from distca.models.shape import ModelShape


class QueriesAsTheyAre(MLASelfAttention):
    """Megatron's, which puts a norm before the projection of queries where these have no latent rows, with the
    projection that its spec names."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        classes: dict[str, Any] = super()._resolve_qk_norm_config(submodules)
        return classes if self.config.q_lora_rank else classes | {"linear_q_proj": submodules.linear_q_proj}


def latent_fields(shape: ModelShape, on_gpu: bool) -> dict[str, Any]:
    """The fields that say what a model's latent attention is; none without.

    On GPUs positions are YaRN's with factor 1, which leaves frequencies as they are: Megatron's fused rotation takes no
    others.
    """
    latent = shape.latent
    if not latent.kv_rank:
        return {}
    return {
        "q_lora_rank": latent.q_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.key_dim,
        "qk_pos_emb_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
        "rope_type": "yarn" if on_gpu else "rope",
        "rotary_base": shape.rope_base,
        "rotary_scaling_factor": 1.0,
    }


def latent_spec(config: Any, on_gpu: bool) -> TransformerBlockSubmodules:
    """The layers of a model with latent attention, each with an MLP or experts."""
    if not on_gpu:
        from distca.parity.latent import latent_layer

        experts = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
        mixture = {"num_experts": config.num_moe_experts, "moe_grouped_gemm": False}
        layers = [latent_layer(config, **(mixture if each else {})) for each in experts]
        return TransformerBlockSubmodules(layers, WrappedTorchNorm)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, normalization="RMSNorm")
    for layer in block.layer_specs or ():
        layer.submodules.self_attention.module = QueriesAsTheyAre
    return block
