"""GLM-4 (0414), whose positions turn neighbours in half of each head, with norms before and behind; and GLM-4.5."""

from __future__ import annotations

from typing import Final

from distca.models.families.common import SHAPE
from distca.models.families.family import Family
from distca.models.families.sigmoid import FURTHER, SIGMOID, sigmoid_experts
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

GLM4_MOE: Final = Family(
    architecture="Glm4MoeForCausalLM",
    fields=SHAPE
    | SIGMOID
    | {
        "num_key_value_heads": Read("count", 8, optional=True),
        "max_position_embeddings": Read("count", 131072),
        "rms_norm_eps": Read("number", 1e-5),
        "attention_bias": Read("switch", False),
        "use_qk_norm": Read("switch", False),
        "partial_rotary_factor": Read("number", None, optional=True),
        "moe_intermediate_size": Read("count", 1408),
        "n_routed_experts": Read("count", 128),
        "routed_scaling_factor": Read("number", 1.0),
        "n_group": Read("count", 1),
        "topk_group": Read("count", 1),
        "first_k_dense_replace": Read("index", 1),
    },
    rotary_percent=None,
    rotary_default=0.5,
    qkv_bias="attention_bias",
    qk_norm="use_qk_norm",
    experts=sigmoid_experts,
    further_layers=FURTHER,
)
