"""What a family of models is: the fields of its config.json, its layers, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from distca.models.fields import Field
from distca.models.weight_map import WeightMap

Windows = Literal["none", "every", "typed", "switched"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model type.

    Attributes:
        architecture: its class with the output layer, in transformers.
        fields: what each field of its config.json does, besides those that all families have.
        rope_kinds: scalings of rotary positions that its class computes as others do.
        windows: which layers have the window of sliding_window: none knows no windows, every has it in all layers,
            typed in those that layer_types names, switched in the same if use_sliding_window is true.
        qkv_bias: projections of q, k and v have a bias.
        qk_norm: query and key heads are normed before the rotation.
        weights: names of its tensors.
    """

    architecture: str
    fields: Mapping[str, Field]
    rope_kinds: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
    windows: Windows = "none"
    qkv_bias: bool = False
    qk_norm: bool = False
    weights: WeightMap = field(default_factory=WeightMap)


@dataclass(frozen=True, kw_only=True)
class Composite:
    """A model type of several parts, of which the text's is trained and the others are carried along.

    Attributes:
        architecture: its class, in transformers.
        fields: what each field of its config.json does, besides those that all families have.
        text: the field with the text part's own fields.
        families: model types that the text part may have; the first one where it does not say.
        others: what the names of the other parts' tensors begin with.
    """

    architecture: str
    fields: Mapping[str, Field]
    text: str
    families: tuple[str, ...]
    others: tuple[str, ...]
