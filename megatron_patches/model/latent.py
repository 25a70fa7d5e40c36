"""Converts the sizes of multi-head latent attention (DeepSeek-V2) to and from fields of Megatron's configuration."""

from __future__ import annotations

import math
from typing import Any

from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_mscale
from megatron.core.transformer import TransformerConfig

from distca.models.latent import Latent
from distca.models.rope import RopeScaling, yarn_magnitude
from distca.models.shape import ModelShape


def is_latent(config: TransformerConfig) -> bool:
    return bool(getattr(config, "multi_latent_attention", False))


def latent_dims(config: Any) -> tuple[int, int]:
    """Returns the number of elements of a query or key head, and the number of elements of a value head."""
    return config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim


def latent_scale(config: Any) -> float:
    """Returns the factor on attention scores in Megatron's MultiLatentAttention."""
    factor = _yarn_get_mscale(config.rotary_scaling_factor, config.mscale_all_dim)
    return float(factor * factor / math.sqrt(latent_dims(config)[0]))


def latent_of(config: Any) -> Latent:
    return Latent(
        kv_rank=config.kv_lora_rank,
        q_rank=config.q_lora_rank or 0,
        key_dim=config.qk_head_dim,
        rotary_dim=config.qk_pos_emb_head_dim,
        value_dim=config.v_head_dim,
    )


def latent_fields(shape: ModelShape) -> dict[str, Any]:
    """Returns the configuration's fields by name; an empty dictionary if the model has no latent attention."""
    latent, scaling = shape.latent, shape.rope_scaling
    if not latent.kv_rank:
        return {}
    return {
        "multi_latent_attention": True,
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.q_rank or None,
        "qk_head_dim": latent.key_dim,
        "qk_pos_emb_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
        "qk_layernorm": True,
        "softmax_scale": None,  # not read by Megatron's latent attention
        "rotary_base": shape.rope_base,
        "rope_type": "yarn" if scaling.kind == "yarn" else "rope",
        "rotary_scaling_factor": scaling.factor if scaling.kind == "yarn" else 1.0,
        "mscale_all_dim": latent.score_magnitude,
        **(_yarn(scaling, latent.score_magnitude) if scaling.kind == "yarn" else {}),
    }


def _yarn(scaling: RopeScaling, score_magnitude: float) -> dict[str, Any]:
    """Returns the fields of YaRN, a scaling of RoPE for long contexts; ``score_magnitude`` is ``mscale_all_dim``.

    Megatron multiplies cosines and sines by m(mscale) / m(mscale_all_dim), with m(w) = 1 + 0.1 w ln(scaling factor).
    ``mscale`` is chosen so that this quotient is ``scaling.resolved_attention_factor``. With scaling factor 1 the
    quotient is 1 for any ``mscale``; :meth:`Latent.scaling_problem` refuses another attention factor there."""
    magnitude = scaling.resolved_attention_factor * yarn_magnitude(scaling.factor, score_magnitude)
    return {
        "original_max_position_embeddings": scaling.original_length,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "mscale": (magnitude - 1) / (0.1 * math.log(scaling.factor)) if scaling.factor > 1 else 1.0,
    }
