"""Dense families whose blocks are LLaMA's, with other biases, multipliers, activations or rotations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from distca.models.families.common import SHAPE
from distca.models.families.family import Family
from distca.models.fields import OFF, Inert, Only, Read
from distca.models.variant import Variant
from distca.models.weight_map import WeightMap

# Arcee (AFM-4.5B) has an MLP without a gate, which squares its ReLU.
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

# The dense ones of ERNIE 4.5: positions turn neighbours.
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

# Granite 3 has multipliers on its way.
GRANITE: Final = Family(
    architecture="GraniteForCausalLM",
    fields=SHAPE
    | {
        "num_key_value_heads": Read("count", None, optional=True),
        "max_position_embeddings": Read("count", 2048),
        "rms_norm_eps": Read("number", 1e-6),
        "attention_bias": Read("switch", False),
        "mlp_bias": Read("switch", False),
        "embedding_multiplier": Read("number", 1.0),
        "residual_multiplier": Read("number", 1.0),
        "attention_multiplier": Read("number", 1.0),
        "logits_scaling": Read("number", 1.0),
    },
    qkv_bias="attention_bias",
    variant=lambda said: Variant(
        attention_output_bias=said["attention_bias"],
        mlp_bias=said["mlp_bias"],
        score_scale=said["attention_multiplier"],
        embedding_scale=said["embedding_multiplier"],
        residual_multiplier=said["residual_multiplier"],
        logit_multiplier=1 / said["logits_scaling"],
    ),
)

# The dense ones have norms of query and key heads behind the rotation, whose base a fixed alpha may stretch.
HUNYUAN: Final = Family(
    architecture="HunYuanDenseV1ForCausalLM",
    fields=SHAPE
    | {
        "num_key_value_heads": Read("count", None, optional=True),
        # Its class computes no head_dim where there is none.
        "head_dim": Read("count"),
        "max_position_embeddings": Read("count", 2048),
        "rms_norm_eps": Read("number", 1e-5),
        "attention_bias": Read("switch", False),
        "eod_token_id": Inert("It names an id; texts take the tokenizer's."),
        "use_qk_norm": Only((None, True), "Hunyuan has norms of queries and keys in transformers in any case"),
    },
    alpha=True,
    qk_norm=True,
    qkv_bias="attention_bias",
    variant=lambda said: Variant(norm_after_rotation=True, attention_output_bias=said["attention_bias"]),
    weights=WeightMap(query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm"),
)

_DROPOUT = Only(OFF, "no dropout is served; set it to 0")

# Phi-3 and Phi-4 have fused projections; Phi-4-mini turns a part of each head, stretched by longrope.
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

# Qwen2, Qwen2.5 and the dense Qwen3.
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


def _unrotated(said: Mapping[str, Any]) -> list[int]:
    """Numbers of the layers without rotary positions: in no_rope_layers 1 means that a layer has them."""
    layers, every, rotated = said["num_hidden_layers"], said["no_rope_layer_interval"], said["no_rope_layers"]
    if rotated is None:
        rotated = [(layer + 1) % every != 0 for layer in range(layers)]
    return [layer for layer, turns in enumerate(rotated[:layers]) if not turns]


# In SmolLM3 some layers have no rotary positions.
SMOLLM3: Final = Family(
    architecture="SmolLM3ForCausalLM",
    fields=SHAPE
    | {
        "num_key_value_heads": Read("count", 4, optional=True),
        "max_position_embeddings": Read("count", 32768),
        "rms_norm_eps": Read("number", 1e-6),
        "tie_word_embeddings": Read("switch", True),
        "use_sliding_window": Read("switch", False),
        "sliding_window": Read("count", None, optional=True),
        "layer_types": Read("texts", None, optional=True),
        "no_rope_layers": Read("switches", None, optional=True),
        "no_rope_layer_interval": Read("count", 4),
        "attention_bias": Read("switch", False),
        "mlp_bias": Read("switch", False),
    },
    windows="unrotated",
    rope_base=2000000.0,
    qkv_bias="attention_bias",
    variant=lambda said: Variant(
        unrotated_layers=_unrotated(said), attention_output_bias=said["attention_bias"], mlp_bias=said["mlp_bias"]
    ),
)
