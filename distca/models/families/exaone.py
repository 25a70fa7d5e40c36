"""EXAONE 4: norms behind attention and MLP; where it has windows, layers without turn nothing."""

from __future__ import annotations

from typing import Final

from distca.models.families.common import SHAPE
from distca.models.families.family import Family
from distca.models.fields import Read
from distca.models.variant import Variant
from distca.models.weight_map import WeightMap

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
