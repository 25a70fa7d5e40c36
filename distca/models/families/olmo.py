"""OLMo 2 and 3: norms behind attention and MLP, and norms over all query heads and over all key heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from distca.models.families.common import SHAPE
from distca.models.families.family import Family, WindowRope
from distca.models.fields import Read
from distca.models.variant import Variant
from distca.models.weight_map import WeightMap

_OLMO = SHAPE | {
    "num_key_value_heads": Read("count", None, optional=True),
    "max_position_embeddings": Read("count", 2048),
    "attention_bias": Read("switch", False),
}
_WEIGHTS = WeightMap(attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm")


def _variant(said: Mapping[str, Any]) -> Variant:
    return Variant(norms="post", query_key_norm="width", attention_output_bias=said["attention_bias"])


OLMO2: Final = Family(
    architecture="Olmo2ForCausalLM",
    fields=_OLMO,
    qk_norm=True,
    qkv_bias="attention_bias",
    variant=_variant,
    weights=_WEIGHTS,
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
    variant=_variant,
    weights=_WEIGHTS,
)
