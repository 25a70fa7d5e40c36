"""Mistral-Small-3.1, Ministral 3 and others with images, whose text part is a Mistral or a Ministral 3."""

from __future__ import annotations

from typing import Final

from distca.models.families.family import Composite
from distca.models.fields import Inert, Read

_VISION = Inert("It belongs to the part that sees images, which is carried along as it is.")

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
        _VISION,
    ),
    text="text_config",
    families=("mistral", "ministral3"),
    others=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)
