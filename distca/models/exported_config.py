"""The config.json of a model that was trained: that of the folder it began with, but for what training changed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from distca.models.description import ModelDescription, architecture, describe, text_family, text_fields
from distca.models.families import COMPOSITES, FAMILIES
from distca.models.rope_fields import FULL_LAYERS, WINDOW_LAYERS, field_of_rope

_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")
"""Fields that may say something of rotary positions."""
_OF_IMAGES = {"mrope_section", "mrope_interleaved"}
"""Fields of the positions of images, which stay as they are."""


def config_fields(model: ModelDescription, dtype: str, first: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a config.json.

    Args:
        model: what it describes.
        dtype: of the tensors, such as "bfloat16".
        first: the config.json that training began with, of which all else is kept; empty where there was none.

    Raises:
        ModelError: ``first`` describes no model that is served.
    """
    if not first:
        return _new(model, dtype)
    began, fields = describe(first, "config.json"), copy.deepcopy(dict(first))
    text: Any = text_fields(fields)
    if began.quantised:
        del fields["quantization_config"]
    for part in (fields, text):
        part |= {name: dtype for name in ("dtype", "torch_dtype") if part.get(name) is not None}
    if not {"dtype", "torch_dtype"} & fields.keys():
        fields["torch_dtype"] = dtype
    if model.family in COMPOSITES and fields.get("tie_word_embeddings") is None:
        fields["tie_word_embeddings"] = model.tie_embeddings  # else its class decides by the tensors
    if model.positions != began.positions:
        text["max_position_embeddings"] = model.positions
        _keep_factor(text, began)
    if (model.variant.window_rope_base or _by_kind_of_layer(text)) and (model.rope_scaling, model.rope_base) != (
        began.rope_scaling,
        began.rope_base,
    ):
        _set_full_layers(text, model)
    elif model.rope_scaling != began.rope_scaling or (
        model.rope_base != began.rope_base and "alpha" in (text.get(field_of_rope(text)) or {})
    ):
        _set_scaling(text, model)
    elif model.rope_base != began.rope_base:
        _set_base(text, model.rope_base)
    return fields


def _new(model: ModelDescription, dtype: str) -> dict[str, Any]:
    """The config.json of a model that began with no folder."""
    return {
        "architectures": [architecture(model.family)],
        "model_type": model.family,
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocabulary,
        "max_position_embeddings": model.positions,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
        "hidden_act": "silu",
        "torch_dtype": dtype,
        "rope_theta": model.rope_base,  # version 5 reads these two as well, and version 4 no others
        "rope_scaling": _scaling_fields(model) or None,
    } | ({"sliding_window": None} if model.family == "mistral" else {})


def _keep_factor(text: dict[str, Any], began: ModelDescription) -> None:
    """Write down a factor that transformers takes from the positions, before these become others."""
    rope = text.get(field_of_rope(text)) or {}
    if _by_kind_of_layer(text):
        rope = rope[FULL_LAYERS]
    if began.rope_scaling.kind in ("yarn", "longrope") and rope.get("factor") is None:
        rope["factor"] = began.rope_scaling.factor


def _by_kind_of_layer(text: Mapping[str, Any]) -> bool:
    """Whether layers with and without windows have rotary positions of their own, also where none has a window."""
    rope = text.get("rope_parameters")
    return isinstance(rope, Mapping) and bool(rope.get(FULL_LAYERS))


def _set_base(text: dict[str, Any], base: float) -> None:
    """Write another base where the first one was, or where transformers looks first."""
    inside = text.get(field_of_rope(text)) or {}
    (inside if "rope_theta" in inside or text.get("rope_parameters") else text)["rope_theta"] = base


def _set_scaling(text: dict[str, Any], model: ModelDescription) -> None:
    """Write another scaling in place of the first one; of that nothing is left."""
    scaling = _scaling_fields(model)
    if model.variant.query_beta:
        scaling["llama_4_scaling_beta"] = model.variant.query_beta
        scaling["original_max_position_embeddings"] = model.variant.query_length
    if model.latent.score_magnitude and scaling:
        scaling["mscale_all_dim"] = model.latent.score_magnitude
    # A class with a scaling of its own takes it where rope_parameters are missing.
    newer = "rope_parameters" in text or bool(FAMILIES[text_family(model.family)].rope_default)
    inside = text.get(field_of_rope(text)) or {}
    part, of_images = inside.get("partial_rotary_factor"), {name: inside[name] for name in _OF_IMAGES & inside.keys()}
    for name in _ROPE:
        text.pop(name, None)
    if newer:
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": model.rope_base, **scaling, **of_images}
    else:
        text |= {"rope_theta": model.rope_base, "rope_scaling": scaling or None}
    if part is not None:
        text["partial_rotary_factor"] = part
    if model.family == "mixtral" and text.get("head_dim") is None:  # its class computes none, which some scalings need
        text["head_dim"] = model.head_dim
    if model.rope_scaling.kind == "longrope":  # Phi-3's class reads it here only
        text["original_max_position_embeddings"] = model.rope_scaling.original_length


def _set_full_layers(text: dict[str, Any], model: ModelDescription) -> None:
    """Write other rotary positions of the layers without windows, and beside them what those with windows have."""
    parts = (text.get("rope_parameters") or {}) if _by_kind_of_layer(text) else {}
    for name in (*_ROPE, "rope_local_base_freq"):
        text.pop(name, None)
    full = {"rope_type": "default", "rope_theta": model.rope_base, **_scaling_fields(model)}
    if model.variant.window_rope_base:
        parts |= {WINDOW_LAYERS: {"rope_type": "default", "rope_theta": model.variant.window_rope_base}}
    text["rope_parameters"] = {**parts, FULL_LAYERS: full}


def _scaling_fields(model: ModelDescription) -> dict[str, Any]:
    scaling = model.rope_scaling
    if scaling.kind == "none":
        return {}
    fields: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn", "longrope"):
        fields["original_max_position_embeddings"] = scaling.original_length
    if scaling.kind == "llama3":
        fields |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        fields |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
        if scaling.attention_factor is not None:  # else a later extension by another factor would keep it
            fields["attention_factor"] = scaling.attention_factor
    if scaling.kind == "longrope":
        fields |= {"short_factor": scaling.short_factors, "long_factor": scaling.long_factors}
        if scaling.attention_factor is not None:
            fields["attention_factor"] = scaling.attention_factor
    return fields
