"""Gemma 2 and Gemma 3: windows, norms before and behind attention and MLP, and a scaled embedding.

Norms multiply by one plus their weight. Of a Gemma 3 with images the text part is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from distca.models.families.common import SHAPE
from distca.models.families.family import BESIDE_TEXT, VISION, Composite, Family, WindowRope
from distca.models.fields import OFF, Inert, Only, Read
from distca.models.variant import Variant
from distca.models.weight_map import WeightMap

_WEIGHTS = WeightMap(mlp_norm="pre_feedforward_layernorm")

_GEMMA = SHAPE | {
    "num_attention_heads": Read("count", 8),
    "num_key_value_heads": Read("count", 4),
    "head_dim": Read("count", 256),
    "rms_norm_eps": Read("number", 1e-6),
    "tie_word_embeddings": Read("switch", True),
    "hidden_activation": Only(("gelu_pytorch_tanh",), "only gelu_pytorch_tanh is served for Gemma"),
    "hidden_act": Inert("Its class reads hidden_activation."),
    "attention_bias": Read("switch", False),
    "query_pre_attn_scalar": Read("number", 256),
    "sliding_window": Read("count", 4096),
    "layer_types": Read("texts", None, optional=True),
    "use_bidirectional_attention": Only(OFF, "every token attends to those before it only"),
}


def _variant(said: Mapping[str, Any]) -> Variant:
    return Variant(
        activation="gelu",
        attention_output_bias=said["attention_bias"],
        zero_centered_norms=True,
        norms="both",
        score_scale=said["query_pre_attn_scalar"] ** -0.5,
        score_softcap=said.get("attn_logit_softcapping") or 0.0,
        embedding_scale=said["hidden_size"] ** 0.5,
        final_softcap=said["final_logit_softcapping"] or 0.0,
    )


GEMMA2: Final = Family(
    architecture="Gemma2ForCausalLM",
    fields=_GEMMA
    | {
        "vocab_size": Read("count", 256000),
        "max_position_embeddings": Read("count", 8192),
        "final_logit_softcapping": Read("number", 30.0, optional=True),
        "attn_logit_softcapping": Read("number", 50.0, optional=True),
    },
    windows="periodic",
    full_every=2,
    qkv_bias="attention_bias",
    variant=_variant,
    weights=_WEIGHTS,
)

GEMMA3: Final = Family(
    architecture="Gemma3ForCausalLM",
    fields=_GEMMA
    | {
        "vocab_size": Read("count", 262208),
        "max_position_embeddings": Read("count", 131072),
        "final_logit_softcapping": Read("number", None, optional=True),
        "attn_logit_softcapping": Only((None,), "transformers leaves scores of Gemma 3 without a limit"),
        "sliding_window_pattern": Read("count", 6),
        "_sliding_window_pattern": Inert("layer_types says it."),
        "rope_local_base_freq": Read("number", 10000.0),
    },
    rope_kinds=("default", "linear", "dynamic", "llama3", "yarn"),
    windows="periodic",
    full_every="sliding_window_pattern",
    rope_base=1000000.0,
    window_rope=WindowRope(default=10000.0, field="rope_local_base_freq"),
    qk_norm=True,
    qkv_bias="attention_bias",
    variant=_variant,
    weights=_WEIGHTS,
)

GEMMA3_IMAGES: Final = Composite(
    architecture="Gemma3ForConditionalGeneration",
    fields={"text_config": Read("fields")}
    | dict.fromkeys(
        (
            *("vision_config", "mm_tokens_per_image", "image_token_index", "image_token_id"),
            *("boi_token_index", "boi_token_id", "eoi_token_index", "eoi_token_id"),
        ),
        VISION,
    ),
    text="text_config",
    families=("gemma3_text",),
    others=BESIDE_TEXT,
)
