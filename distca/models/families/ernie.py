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
        "use_bias": Only(OFF, "ERNIE is served without biases: those of its MLP are not trained here"),
        "attention_dropout": Only(OFF, "core attention has none, and transformers reads no such field of ERNIE"),
    },
    rope_base=500000.0,
    variant=lambda said: Variant(rotary_interleaved=True),
)
