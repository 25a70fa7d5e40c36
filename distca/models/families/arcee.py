"""Arcee (AFM-4.5B): a LLaMA whose MLP has no gate and squares its ReLU."""

from __future__ import annotations

from typing import Final

from distca.models.families.common import SHAPE
from distca.models.families.family import Family
from distca.models.fields import Only, Read
from distca.models.variant import Variant
from distca.models.weight_map import WeightMap

ARCEE: Final = Family(
    architecture="ArceeForCausalLM",
    fields=SHAPE
    | {
        "num_key_value_heads": Read("count", None, optional=True),
        "max_position_embeddings": Read("count", 4096),
        "rms_norm_eps": Read("number", 1e-5),
        "hidden_act": Only(("relu2",), "only relu2 is served in an MLP without a gate"),
        "attention_bias": Read("switch", False),
        "mlp_bias": Read("switch", False),
    },
    qkv_bias="attention_bias",
    variant=lambda said: Variant(
        activation="relu2",
        gated=False,
        attention_output_bias=said["attention_bias"],
        mlp_bias=said["mlp_bias"],
    ),
    weights=WeightMap(gate_up=("mlp.up_proj",)),
)
