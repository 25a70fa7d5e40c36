"""Qwen2, Qwen2.5 and the dense Qwen3."""

from __future__ import annotations

from typing import Final

from distca.models.families.common import SHAPE
from distca.models.families.family import Family
from distca.models.fields import Read
from distca.models.variant import Variant

_QWEN = SHAPE | {
    "max_position_embeddings": Read("count", 32768),
    "use_sliding_window": Read("switch", False),
    "sliding_window": Read("count", 4096, optional=True),
    "max_window_layers": Read("index", 28),
    "layer_types": Read("texts", None, optional=True),
}

QWEN2: Final = Family(
    architecture="Qwen2ForCausalLM",
    fields=_QWEN | {"head_dim": Read("count", None)},
    windows="switched",
    qkv_bias=True,
)

QWEN3: Final = Family(
    architecture="Qwen3ForCausalLM",
    fields=_QWEN
    | {
        "head_dim": Read("count", 128),
        "attention_bias": Read("switch", False),
    },
    windows="switched",
    quantised="fp8",
    qkv_bias="attention_bias",
    qk_norm=True,
    variant=lambda said: Variant(attention_output_bias=said["attention_bias"]),
)
