"""LLaMA and the families that differ from it in few fields: Mistral, Ministral, Ministral 3 and Seed-OSS.

Mistral-Small-3.1 and Ministral 3 come with a part that sees images, of which the text part is trained.
"""

from __future__ import annotations

from typing import Final

from distca.models.families.common import SHAPE
from distca.models.families.family import BESIDE_TEXT, VISION, Composite, Family
from distca.models.fields import LeftOut, Only, Read
from distca.models.variant import Variant

_POSITIONS = 4096 * 32

LLAMA: Final = Family(
    architecture="LlamaForCausalLM",
    fields=SHAPE
    | {
        "num_key_value_heads": Read("count", None, optional=True),
        "max_position_embeddings": Read("count", 2048),
        "attention_bias": Read("switch", False),
        "mlp_bias": Read("switch", False),
    },
    qkv_bias="attention_bias",
    variant=lambda said: Variant(attention_output_bias=said["attention_bias"], mlp_bias=said["mlp_bias"]),
)

_MISTRAL = SHAPE | {
    "max_position_embeddings": Read("count", _POSITIONS),
    "sliding_window": Read("count", 4096, optional=True),
}

MISTRAL: Final = Family(
    architecture="MistralForCausalLM",
    fields=_MISTRAL | {"layer_types": Read("texts", None, optional=True)},
    windows="every",
)

MINISTRAL: Final = Family(
    architecture="MinistralForCausalLM",
    # Its class computes no head_dim where there is none.
    fields=_MISTRAL | {"head_dim": Read("count"), "layer_types": Read("texts", None, optional=True)},
    windows="typed",
)

MINISTRAL3: Final = Family(
    architecture="Ministral3ForCausalLM",
    fields=SHAPE
    | {
        "max_position_embeddings": Read("count", 262144),
        "head_dim": Read("count", 128, optional=True),
        "sliding_window": Read("count", None, optional=True),
        "layer_types": Read("texts", None, optional=True),
        # Its class has a scaling of its own where there is none.
        "rope_parameters": Read("fields"),
        "original_max_position_embeddings": Only((None,), "it belongs into rope_parameters, where queries go by it"),
    },
    windows="every",
    scales_queries=True,
)

SEED_OSS: Final = Family(
    architecture="SeedOssForCausalLM",
    fields=SHAPE
    | {
        "max_position_embeddings": Read("count", 524288),
        "head_dim": Read("count", 128, optional=True),
        "attention_bias": Read("switch", True),
        "attention_out_bias": Read("switch", False),
        "mlp_bias": Read("switch", False),
        "attention_dropout": LeftOut("which is left out: nothing is dropped in training", default=0.1),
        "residual_dropout": LeftOut("which is left out: nothing is dropped in training", default=0.1),
    },
    qkv_bias="attention_bias",
    variant=lambda said: Variant(attention_output_bias=said["attention_out_bias"], mlp_bias=said["mlp_bias"]),
)

MISTRAL3: Final = Composite(
    architecture="Mistral3ForConditionalGeneration",
    fields={"text_config": Read("fields")}
    | dict.fromkeys(
        (
            "vision_config",
            "image_token_index",
            "image_token_id",
            "projector_hidden_act",
            "vision_feature_layer",
            "multimodal_projector_bias",
            "spatial_merge_size",
        ),
        VISION,
    ),
    text="text_config",
    families=("mistral", "ministral3"),
    others=BESIDE_TEXT,
)
