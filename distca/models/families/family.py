"""The description of a family of models: the fields of its config.json, its layers, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from distca.models.experts import Experts
from distca.models.fields import Field, Inert
from distca.models.hybrid import Hybrid
from distca.models.latent import Latent
from distca.models.variant import Variant
from distca.models.weight_map import WeightMap

Quantised = Literal["mxfp4", "fp8"]
Windows = Literal["none", "every", "typed", "switched", "periodic", "unrotated"]


@dataclass(frozen=True, kw_only=True)
class WindowRope:
    """Rotary positions of a family whose layers with windows have a base of their own, and nothing that stretches them.

    Attributes:
        default: the base, where nothing says one.
        field: the field that says it in old files; None where there is none.
    """

    default: float
    field: str | None = None


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model type.

    Attributes:
        architecture: its class with the output layer, in transformers.
        fields: what each field of its config.json does, besides those that all families have.
        rope_kinds: kinds of scaling of rotary positions that are served in it.
        windows: which layers have the window of sliding_window: none knows no windows, every has it in all layers,
            typed in those that layer_types names, switched in the same if use_sliding_window is true. Periodic has it
            in all but every full_every-th layer where layer_types is missing. Unrotated has it in those without rotary
            positions, if use_sliding_window is true.
        full_every: of periodic; a number of layers, or the field that says it.
        turns_windows_only: with sliding_window, layers without windows have no rotary positions.
        epsilon: the field with that of norms.
        rotary_percent: the part of each head that positions turn; None where partial_rotary_factor says it.
        rotary_default: that part, where nothing says it.
        alpha: a dynamic scaling with alpha is a base that is stretched once and for all.
        scales_queries: queries grow with their position, as llama_4_scaling_beta says.
        rope_base: of rotary positions, where nothing says one.
        rope_default: fields of their scaling, where nothing says one.
        window_rope: what rotary positions are in layers with windows, where these differ.
        variant: what its layers do differently from LLaMA's, by the values of its fields.
        qkv_bias: projections of q, k and v have a bias; or the field that says whether they do.
        qk_norm: query and key heads are normed before the rotation; or the field that says whether they are.
        experts: those of its layers, by the values of its fields.
        latent: how keys and values are expanded from narrow rows, by the values of its fields.
        sinks: every query head has a learned score without a value.
        further_layers: fields of which the first that is there says how many layers behind the last predict further
            tokens, which are carried along as they are.
        quantised: a kind of quantised weights that its folders may have, which are read as numbers in bfloat16.
        hybrid: recurrent layers beside attention, with a symbol for each layer in its pattern, by the values of its
            fields.
        others: what the names of tensors begin with that are not trained and are carried along.
        image_positions: it has fields of the positions of images, which change nothing in texts.
        weights: names of its tensors.
    """

    architecture: str
    fields: Mapping[str, Field]
    rope_kinds: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
    windows: Windows = "none"
    full_every: int | str = 1
    turns_windows_only: bool = False
    epsilon: str = "rms_norm_eps"
    rotary_percent: float | None = 1.0
    rotary_default: float = 1.0
    alpha: bool = False
    scales_queries: bool = False
    rope_base: float = 10000.0
    rope_default: Mapping[str, Any] = field(default_factory=dict)
    window_rope: WindowRope | None = None
    variant: Callable[[Mapping[str, Any]], Variant] = lambda said: Variant()
    qkv_bias: bool | str = False
    qk_norm: bool | str = False
    sinks: bool = False
    experts: Callable[[Mapping[str, Any]], Experts] = lambda said: Experts()
    latent: Callable[[Mapping[str, Any]], Latent] = lambda said: Latent()
    further_layers: tuple[str, ...] = ()
    quantised: Quantised | None = None
    hybrid: Callable[[Mapping[str, Any]], Hybrid] = lambda said: Hybrid()
    others: tuple[str, ...] = ()
    image_positions: bool = False
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
        ties: where nothing says so, the output layer uses the embedding's weights, unless files have one of its own.
    """

    architecture: str
    fields: Mapping[str, Field]
    text: str
    families: tuple[str, ...]
    others: tuple[str, ...]
    ties: bool = True


VISION: Final = Inert("It belongs to the part that sees images, which is carried along as it is.")
BESIDE_TEXT: Final = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
"""The beginnings of the names of tensors that see images, in Mistral's and Gemma's models."""
