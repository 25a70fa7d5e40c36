"""SmolLM3, in which some layers have no rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from distca.models.families.common import SHAPE
from distca.models.families.family import Family
from distca.models.fields import Read
from distca.models.variant import Variant


def _unrotated(said: Mapping[str, Any]) -> list[int]:
    """Numbers of the layers without rotary positions: in no_rope_layers 1 means that a layer has them."""
    layers, every, rotated = said["num_hidden_layers"], said["no_rope_layer_interval"], said["no_rope_layers"]
    if rotated is None:
        rotated = [(layer + 1) % every != 0 for layer in range(layers)]
    return [layer for layer, turns in enumerate(rotated[:layers]) if not turns]


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
