"""Multi-head latent attention: Megatron's MLATransformerConfig, whose values are narrower than its keys."""

from __future__ import annotations

import math
from typing import Any

from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_mscale
from megatron.core.transformer import TransformerConfig


def is_latent(config: TransformerConfig) -> bool:
    """Whether the layers have multi-head latent attention."""
    return bool(getattr(config, "multi_latent_attention", False))


def latent_dims(config: Any) -> tuple[int, int]:
    """Elements of a head of queries and keys, and of values."""
    return config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim


def latent_scale(config: Any) -> float:
    """The factor on scores, as Megatron's MultiLatentAttention computes it for both types of positions."""
    factor = _yarn_get_mscale(config.rotary_scaling_factor, config.mscale_all_dim)
    return float(factor * factor / math.sqrt(latent_dims(config)[0]))
