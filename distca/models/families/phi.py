"""Phi-3 and Phi-4, whose projections are fused."""

from __future__ import annotations

from typing import Final

from distca.models.families.common import SHAPE
from distca.models.families.family import Family
from distca.models.fields import OFF, Inert, Only, Read
from distca.models.weight_map import WeightMap

_DROPOUT = Only(OFF, "no dropout is served; set it to 0")

PHI3: Final = Family(
    architecture="Phi3ForCausalLM",
    fields=SHAPE
    | {
        "num_key_value_heads": Read("count", None, optional=True),
        "max_position_embeddings": Read("count", 4096),
        "original_max_position_embeddings": Inert("Only longrope takes it, which is not served."),
        "sliding_window": Read("count", None, optional=True),
        "partial_rotary_factor": Only((1,), "rotary positions turn all of a head here"),
        "resid_pdrop": _DROPOUT,
        "embd_pdrop": _DROPOUT,
    },
    rope_kinds=("default",),
    windows="every",
    weights=WeightMap(query_key_value=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
)
