"""ERNIE 4.5, the dense ones: a LLaMA in which positions turn neighbours."""

from __future__ import annotations

from typing import Final

from distca.models.families.common import SHAPE
from distca.models.families.family import Family
from distca.models.fields import OFF, Only, Read
from distca.models.variant import Variant

ERNIE4_5: Final = Family(
    architecture="Ernie4_5ForCausalLM",
    fields=SHAPE
    | {
        "num_key_value_heads": Read("count", 2, optional=True),
        "head_dim": Read("count", 128, optional=True),
        "max_position_embeddings": Read("count", 131072),
        "rms_norm_eps": Read("number", 1e-5),
        "tie_word_embeddings": Read("switch", True),
        "use_bias": Read("switch", False, optional=True),
        "attention_dropout": Only(OFF, "core attention has none, and transformers reads no such field of ERNIE"),
    },
    rope_base=500000.0,
    qkv_bias="use_bias",
    variant=lambda said: Variant(
        rotary_interleaved=True, attention_output_bias=bool(said["use_bias"]), mlp_bias=bool(said["use_bias"])
    ),
)
