"""Granite 3, a LLaMA with multipliers on its way."""

from __future__ import annotations

from typing import Final

from distca.models.families.common import SHAPE
from distca.models.families.family import Family
from distca.models.fields import Read
from distca.models.variant import Variant

GRANITE: Final = Family(
    architecture="GraniteForCausalLM",
    fields=SHAPE
    | {
        "num_key_value_heads": Read("count", None, optional=True),
        "max_position_embeddings": Read("count", 2048),
        "rms_norm_eps": Read("number", 1e-6),
        "attention_bias": Read("switch", False),
        "mlp_bias": Read("switch", False),
        "embedding_multiplier": Read("number", 1.0),
        "residual_multiplier": Read("number", 1.0),
        "attention_multiplier": Read("number", 1.0),
        "logits_scaling": Read("number", 1.0),
    },
    qkv_bias="attention_bias",
    variant=lambda said: Variant(
        attention_output_bias=said["attention_bias"],
        mlp_bias=said["mlp_bias"],
        score_scale=said["attention_multiplier"],
        embedding_scale=said["embedding_multiplier"],
        residual_multiplier=said["residual_multiplier"],
        logit_multiplier=1 / said["logits_scaling"],
    ),
)
