"""Qwen3.5 and Qwen3-Next: three layers with a gated delta net to one with gated attention; and models with images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from distca.errors import ModelError
from distca.models.experts import Experts
from distca.models.families.common import SHAPE
from distca.models.families.family import VISION, Composite, Family
from distca.models.families.mixtures import BALANCE
from distca.models.fields import OFF, Field, Inert, Only, Read
from distca.models.hybrid import ATTENTION, CONVOLUTION, DELTA_NET, EXPERTS, MLP, Hybrid
from distca.models.variant import Variant
from distca.models.weight_map import ExpertMap, RecurrentMap, WeightMap

_FURTHER: Final = Inert("Tensors that predict further tokens are carried along as they are.")
_MIXERS: Final = {"linear_attention": DELTA_NET, "full_attention": ATTENTION}


def _hybrid(said: Mapping[str, Any], mlp: str = MLP) -> Hybrid:
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
        pattern="".join(_MIXERS[kind] + mlp for kind in kinds),
        key_heads=said["linear_num_key_heads"],
        value_heads=said["linear_num_value_heads"],
        key_dim=said["linear_key_head_dim"],
        value_dim=said["linear_value_head_dim"],
        output_gate=True,
        plain_norm="linear_attention" in kinds,
    )


def _experts(said: Mapping[str, Any]) -> Experts:
    return Experts(
        count=said["num_experts"],
        topk=said["num_experts_per_tok"],
        ffn=said["moe_intermediate_size"],
        shared_ffn=said["shared_expert_intermediate_size"],
        shared_gate=True,
        normalize=said.get("norm_topk_prob", True),
    )


_FIELDS: Final[dict[str, Field]] = SHAPE | {
    "max_position_embeddings": Read("count", 32768),
    "head_dim": Read("count", 256),
    "attention_bias": Only(OFF, "projections of these models have no biases here"),
    "partial_rotary_factor": Read("number", None, optional=True),
    "layer_types": Read("texts", None, optional=True),
    "full_attention_interval": Read("count", 4),
    "linear_conv_kernel_dim": Only((CONVOLUTION,), f"convolutions read {CONVOLUTION} rows here"),
    "linear_key_head_dim": Read("count", 128),
    "linear_value_head_dim": Read("count", 128),
    "linear_num_key_heads": Read("count", 16),
    "linear_num_value_heads": Read("count", 32),
    "attn_output_gate": Only((True,), "attention of these models has an output gate"),
    "mamba_ssm_dtype": Inert("States are float32 in any case."),
    "mlp_only_layers": Only(OFF, "all layers have the same kind of MLP here"),
    "mtp_num_hidden_layers": _FURTHER,
    "mtp_use_dedicated_embeddings": _FURTHER,
}
_MIXTURE: Final[dict[str, Field]] = BALANCE | {
    "intermediate_size": Inert("All layers have experts."),
    "moe_intermediate_size": Read("count", 512),
    "shared_expert_intermediate_size": Read("count", 512),
    "num_experts_per_tok": Read("count", 8),
    "num_experts": Read("count", 256),
}
_PROJECTIONS: Final = (("in_proj_qkv", 3), ("in_proj_z", 1), ("in_proj_b", 1), ("in_proj_a", 1))
_SHARED: Final = ExpertMap(
    shared_gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
)

QWEN3_5: Final = Family(
    architecture="Qwen3_5ForCausalLM",
    fields=_FIELDS,
    rotary_percent=None,
    rotary_default=0.25,
    qk_norm=True,
    variant=lambda said: Variant(zero_centered_norms=True),
    hybrid=_hybrid,
    others=("mtp.",),
    image_positions=True,
    weights=WeightMap(recurrent=RecurrentMap(projections=_PROJECTIONS)),
)

QWEN3_5_MOE: Final = replace(
    QWEN3_5,
    architecture="Qwen3_5MoeForCausalLM",
    fields=_FIELDS | _MIXTURE,
    hybrid=partial(_hybrid, mlp=EXPERTS),
    experts=_experts,
    weights=replace(QWEN3_5.weights, experts=_SHARED),
)

QWEN3_NEXT: Final = replace(
    QWEN3_5_MOE,
    architecture="Qwen3NextForCausalLM",
    fields=_FIELDS
    | _MIXTURE
    | {
        "decoder_sparse_step": Only((1,), "all layers have experts here"),
        "norm_topk_prob": Read("switch", True),
        "num_experts_per_tok": Read("count", 10),
        "num_experts": Read("count", 512),
    },
    image_positions=False,
    weights=WeightMap(
        recurrent=RecurrentMap(projections=(("in_proj_qkvz", 4), ("in_proj_ba", 2)), by_key_head=True), experts=_SHARED
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

QWEN3_5_MOE_IMAGES: Final = replace(
    QWEN3_5_IMAGES, architecture="Qwen3_5MoeForConditionalGeneration", families=("qwen3_5_moe_text",)
)
