"""Qwen3.5, dense: three layers with a gated delta net to one with gated attention; and its models with images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from distca.errors import ModelError
from distca.models.families.common import SHAPE
from distca.models.families.composites import VISION
from distca.models.families.family import Composite, Family
from distca.models.fields import OFF, Inert, Only, Read
from distca.models.hybrid import ATTENTION, CONVOLUTION, DELTA_NET, MLP, Hybrid
from distca.models.variant import Variant
from distca.models.weight_map import RecurrentMap, WeightMap

_FURTHER: Final = Inert("Tensors that predict further tokens are carried along as they are.")
_MIXERS: Final = {"linear_attention": DELTA_NET, "full_attention": ATTENTION}


def _hybrid(said: Mapping[str, Any]) -> Hybrid:
    kinds, layers = said["layer_types"], said["num_hidden_layers"]
    if kinds is None:
        every = said["full_attention_interval"]
        kinds = ["linear_attention" if number % every else "full_attention" for number in range(1, layers + 1)]
    if len(kinds) != layers:
        raise ModelError(f"layer_types has {len(kinds)} layers, but num_hidden_layers is {layers}.")
    for kind in kinds:
        if kind not in _MIXERS:
            raise ModelError(f"layer_types has {kind}, but only {' and '.join(_MIXERS)} are served.")
    return Hybrid(
        pattern="".join(_MIXERS[kind] + MLP for kind in kinds),
        key_heads=said["linear_num_key_heads"],
        value_heads=said["linear_num_value_heads"],
        key_dim=said["linear_key_head_dim"],
        value_dim=said["linear_value_head_dim"],
        output_gate=True,
        plain_norm="linear_attention" in kinds,
    )


QWEN3_5: Final = Family(
    architecture="Qwen3_5ForCausalLM",
    fields=SHAPE
    | {
        "max_position_embeddings": Read("count", 32768),
        "head_dim": Read("count", 256),
        "attention_bias": Only(OFF, "projections of Qwen3.5 have no biases here"),
        "partial_rotary_factor": Read("number", None, optional=True),
        "layer_types": Read("texts", None, optional=True),
        "full_attention_interval": Read("count", 4),
        "linear_conv_kernel_dim": Only((CONVOLUTION,), f"convolutions read {CONVOLUTION} rows here"),
        "linear_key_head_dim": Read("count", 128),
        "linear_value_head_dim": Read("count", 128),
        "linear_num_key_heads": Read("count", 16),
        "linear_num_value_heads": Read("count", 32),
        "attn_output_gate": Only((True,), "attention of Qwen3.5 has an output gate"),
        "mamba_ssm_dtype": Inert("States are float32 in any case."),
        "mlp_only_layers": Only(OFF, "all layers have the same MLP here"),
        "mtp_num_hidden_layers": _FURTHER,
        "mtp_use_dedicated_embeddings": _FURTHER,
    },
    rotary_percent=None,
    rotary_default=0.25,
    qk_norm=True,
    variant=lambda said: Variant(zero_centered_norms=True),
    hybrid=_hybrid,
    others=("mtp.",),
    image_positions=True,
    weights=WeightMap(
        recurrent=RecurrentMap(
            projections=(("in_proj_qkv", 3), ("in_proj_z", 1), ("in_proj_b", 1), ("in_proj_a", 1)),
        )
    ),
)

QWEN3_5_IMAGES: Final = Composite(
    architecture="Qwen3_5ForConditionalGeneration",
    fields={"text_config": Read("fields")}
    | dict.fromkeys(
        (
            *("vision_config", "image_token_id", "video_token_id"),
            *("vision_start_token_id", "vision_end_token_id"),
        ),
        VISION,
    ),
    text="text_config",
    families=("qwen3_5_text",),
    others=("model.visual.",),
    ties=False,
)
