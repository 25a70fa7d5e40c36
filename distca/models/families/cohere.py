"""Cohere 2 (Command R7B), whose MLP is beside attention, and whose layers without windows turn nothing."""

from __future__ import annotations

from typing import Final

from distca.models.families.common import SHAPE
from distca.models.families.family import Family
from distca.models.fields import Inert, Read
from distca.models.variant import Variant

_WITHOUT_EPSILON = {name: field for name, field in SHAPE.items() if name != "rms_norm_eps"}

COHERE2: Final = Family(
    architecture="Cohere2ForCausalLM",
    fields=_WITHOUT_EPSILON
    | {
        "num_key_value_heads": Read("count", None, optional=True),
        "max_position_embeddings": Read("count", 8192),
        "layer_norm_eps": Read("number", 1e-5),
        "tie_word_embeddings": Read("switch", True),
        "attention_bias": Read("switch", False),
        "logit_scale": Read("number", 0.0625),
        "sliding_window": Read("count", 4096),
        "sliding_window_pattern": Read("count", 4),
        "layer_types": Read("texts", None, optional=True),
        "position_embedding_type": Inert("Its class has rotary positions that turn neighbours in any case."),
    },
    epsilon="layer_norm_eps",
    windows="periodic",
    full_every="sliding_window_pattern",
    turns_windows_only=True,
    qkv_bias="attention_bias",
    variant=lambda said: Variant(
        attention_output_bias=said["attention_bias"],
        normalization="LayerNorm",
        parallel_mlp=True,
        rotary_interleaved=True,
        logit_multiplier=said["logit_scale"],
    ),
)
