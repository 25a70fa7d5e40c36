"""GLM-4 (0414): positions turn neighbours in half of each head, and norms are before and behind."""

from __future__ import annotations

from typing import Final

from distca.models.families.common import SHAPE
from distca.models.families.family import Family
from distca.models.fields import Only, Read
from distca.models.variant import Variant
from distca.models.weight_map import WeightMap

GLM4: Final = Family(
    architecture="Glm4ForCausalLM",
    fields=SHAPE
    | {
        "head_dim": Read("count", 128),
        "max_position_embeddings": Read("count", 131072),
        "attention_bias": Read("switch", True),
        "partial_rotary_factor": Only((0.5,), "rotary positions of GLM-4 turn half of a head here"),
    },
    rotary_percent=0.5,
    qkv_bias="attention_bias",
    variant=lambda said: Variant(norms="both", rotary_interleaved=True),
    weights=WeightMap(
        attention_post_norm="post_self_attn_layernorm",
        gate_up=("mlp.gate_up_proj",),
        mlp_post_norm="post_mlp_layernorm",
    ),
)
