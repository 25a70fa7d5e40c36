"""Phi-3 and Phi-4, whose projections are fused; Phi-4-mini turns a part of each head, stretched by longrope."""

from __future__ import annotations

from typing import Final

from distca.models.families.common import SHAPE
from distca.models.families.family import Family
from distca.models.fields import OFF, Only, Read
from distca.models.weight_map import WeightMap

_DROPOUT = Only(OFF, "no dropout is served; set it to 0")

PHI3: Final = Family(
    architecture="Phi3ForCausalLM",
    fields=SHAPE
    | {
        "num_key_value_heads": Read("count", None, optional=True),
        "max_position_embeddings": Read("count", 4096),
        "original_max_position_embeddings": Read("count", 4096),
        "sliding_window": Read("count", None, optional=True),
        "partial_rotary_factor": Read("number", None, optional=True),
        "resid_pdrop": _DROPOUT,
        "embd_pdrop": _DROPOUT,
    },
    rope_kinds=("default", "longrope"),
    rotary_percent=None,
    windows="every",
    weights=WeightMap(query_key_value=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
)
