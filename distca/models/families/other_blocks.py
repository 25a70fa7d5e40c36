"""Dense families whose blocks are put together otherwise than LLaMA's.

OLMo, EXAONE and GLM-4 have norms behind attention and MLP. Cohere 2 has its MLP beside attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from distca.models.families.common import SHAPE
from distca.models.families.family import Family, WindowRope
from distca.models.fields import Inert, Only, Read
from distca.models.variant import Variant
from distca.models.weight_map import WeightMap

# OLMo 2 and 3 have norms over all query heads and over all key heads, too.
_OLMO = SHAPE | {
    "num_key_value_heads": Read("count", None, optional=True),
    "max_position_embeddings": Read("count", 2048),
    "attention_bias": Read("switch", False),
}
_OLMO_WEIGHTS = WeightMap(attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm")


def _olmo_variant(said: Mapping[str, Any]) -> Variant:
    return Variant(norms="post", query_key_norm="width", attention_output_bias=said["attention_bias"])


OLMO2: Final = Family(
    architecture="Olmo2ForCausalLM",
    fields=_OLMO,
    qk_norm=True,
    qkv_bias="attention_bias",
    variant=_olmo_variant,
    weights=_OLMO_WEIGHTS,
)

OLMO3: Final = Family(
    architecture="Olmo3ForCausalLM",
    fields=_OLMO | {"sliding_window": Read("count", 4096), "layer_types": Read("texts", None, optional=True)},
    windows="periodic",
    full_every=4,
    rope_base=500000.0,
    window_rope=WindowRope(default=500000.0),
    qk_norm=True,
    qkv_bias="attention_bias",
    variant=_olmo_variant,
    weights=_OLMO_WEIGHTS,
)

# Where EXAONE 4 has windows, layers without turn nothing.
EXAONE4: Final = Family(
    architecture="Exaone4ForCausalLM",
    fields=SHAPE
    | {
        "max_position_embeddings": Read("count", 2048),
        "sliding_window": Read("count", 4096, optional=True),
        "sliding_window_pattern": Read("pattern", 4, optional=True),
        "layer_types": Read("texts", None, optional=True),
    },
    windows="periodic",
    full_every="sliding_window_pattern",
    turns_windows_only=True,
    qk_norm=True,
    variant=lambda said: Variant(norms="post"),
    weights=WeightMap(attention_post_norm="post_attention_layernorm"),
)

# GLM-4 (0414) also has norms before attention and MLP; its positions turn neighbours in half of each head.
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

# In Cohere 2 (Command R7B) layers without windows turn nothing.
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
