"""Models with images, of which the text part is trained: Mistral-Small-3.1, Ministral 3 and Gemma 3."""

from __future__ import annotations

from typing import Final

from distca.models.families.family import Composite
from distca.models.fields import Inert, Read

VISION = Inert("It belongs to the part that sees images, which is carried along as it is.")
_OTHERS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")

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
    others=_OTHERS,
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
    others=_OTHERS,
)
