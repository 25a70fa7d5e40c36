"""Hunyuan, the dense ones: norms of query and key heads behind the rotation, whose base a fixed alpha may stretch."""

from __future__ import annotations

from typing import Final

from distca.models.families.common import SHAPE
from distca.models.families.family import Family
from distca.models.fields import Inert, Only, Read
from distca.models.variant import Variant
from distca.models.weight_map import WeightMap

HUNYUAN: Final = Family(
    architecture="HunYuanDenseV1ForCausalLM",
    fields=SHAPE
    | {
        "num_key_value_heads": Read("count", None, optional=True),
        # Its class computes no head_dim where there is none.
        "head_dim": Read("count"),
        "max_position_embeddings": Read("count", 2048),
        "rms_norm_eps": Read("number", 1e-5),
        "attention_bias": Read("switch", False),
        "eod_token_id": Inert("It names an id; texts take the tokenizer's."),
        "use_qk_norm": Only((None, True), "Hunyuan has norms of queries and keys in transformers in any case"),
    },
    alpha=True,
    qk_norm=True,
    qkv_bias="attention_bias",
    variant=lambda said: Variant(norm_after_rotation=True, attention_output_bias=said["attention_bias"]),
    weights=WeightMap(query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm"),
)
