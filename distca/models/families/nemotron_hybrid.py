"""Nemotron-H, without experts: Mamba-2, attention without positions and MLPs, each a layer of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from distca.errors import ModelError
from distca.models.families.common import SHAPE
from distca.models.families.family import Family
from distca.models.fields import OFF, Inert, Only, Read
from distca.models.hybrid import ATTENTION, CONVOLUTION, MAMBA, MLP, Hybrid
from distca.models.variant import Variant
from distca.models.weight_map import RecurrentMap, WeightMap

_SYMBOLS: Final = {
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "mlp": MLP,
}
"""The names of layers, of version 5 and of before."""
_EPSILON: Final = 1e-5
_NO_EXPERTS: Final = Inert("Layers of this model have no experts.")
_NO_POSITIONS: Final = Inert("Its class has no rotary positions.")
_NO_BIASES: Final = Only(OFF, "projections of Nemotron-H have no biases here")
_START: Final = Inert("It says how weights are drawn, and these are read.")
_FURTHER: Final = Inert("Tensors that predict further tokens are carried along as they are.")


def _pattern(said: Mapping[str, Any]) -> str:
    if said["layers_block_type"] and said["layer_types"]:
        raise ModelError("there are layers_block_type and layer_types, which are the same; remove one.")
    kinds = said["layers_block_type"] or said["layer_types"]
    if not kinds:
        if not said["hybrid_override_pattern"]:
            raise ModelError("there is no layers_block_type, without which the layers are unknown.")
        return str(said["hybrid_override_pattern"])
    for kind in kinds:
        if kind not in _SYMBOLS:
            raise ModelError(f"layers_block_type has {kind}, but only {', '.join(_SYMBOLS)} are served.")
    return "".join(_SYMBOLS[kind] for kind in kinds)


def _hybrid(said: Mapping[str, Any]) -> Hybrid:
    if said["tie_word_embeddings"]:
        raise ModelError("tie_word_embeddings is true, but its class ties nothing; set it to false.")
    if said["layer_norm_epsilon"] != _EPSILON:
        raise ModelError(
            f"layer_norm_epsilon is {said['layer_norm_epsilon']:g}, but Mamba-2's gated norm has {_EPSILON:g} in "
            "Megatron-Core."
        )
    pattern = _pattern(said)
    if strange := sorted({*pattern} - {*_SYMBOLS.values()}):
        raise ModelError(
            f"hybrid_override_pattern has {strange[0]!r}, but only {' '.join(dict.fromkeys(_SYMBOLS.values()))} are "
            "served of Nemotron-H."
        )
    if MAMBA not in pattern:
        return Hybrid(pattern=pattern, rotate=False)
    return Hybrid(
        pattern=pattern,
        key_heads=said["n_groups"],
        value_heads=said["mamba_num_heads"],
        key_dim=said["ssm_state_size"],
        value_dim=said["mamba_head_dim"],
        rotate=False,
        step_min=said["time_step_min"],
    )


NEMOTRON_H: Final = Family(
    architecture="NemotronHForCausalLM",
    fields={name: field for name, field in SHAPE.items() if name not in ("hidden_act", "rms_norm_eps")}
    | {
        "num_hidden_layers": Inert("layers_block_type says it."),
        "head_dim": Read("count", 128),
        "num_key_value_heads": Read("count", 8),
        "max_position_embeddings": Read("count", 4096),
        "layer_norm_epsilon": Read("number", _EPSILON),
        "attention_head_dim": Inert("Its class reads head_dim."),
        "rms_norm_eps": Inert("Its class reads layer_norm_epsilon."),
        "layers_block_type": Read("texts", None, optional=True),
        "layer_types": Read("texts", None, optional=True),
        "hybrid_override_pattern": Read("text", None, optional=True),
        "attention_bias": Inert("Its class has no biases of queries, keys and values."),
        "mlp_bias": _NO_BIASES,
        "use_bias": _NO_BIASES,
        "mamba_proj_bias": Inert("Its class reads use_bias."),
        "use_conv_bias": Only((True,), "convolutions of Nemotron-H have biases here"),
        "conv_kernel": Only((CONVOLUTION,), f"convolutions read {CONVOLUTION} rows here"),
        "mlp_hidden_act": Only(("relu2",), "only relu2 is served for Nemotron-H"),
        "mamba_hidden_act": Only(("silu", "swish"), "only silu is served for Mamba-2"),
        "ssm_state_size": Read("count", 128),
        "mamba_num_heads": Read("count", 128),
        "mamba_head_dim": Read("count", 64),
        "n_groups": Read("count", 8),
        "time_step_min": Read("number", 0.001),
        "time_step_limit": Inert("Its class reads time_step_min."),
        **dict.fromkeys(("time_step_max", "time_step_floor", "rescale_prenorm_residual"), _START),
        "expand": Inert("mamba_num_heads and mamba_head_dim say it."),
        "chunk_size": Inert("Chunks of any size compute the same."),
        "mamba_ssm_cache_dtype": Inert("States are float32 in any case."),
        "use_mamba_kernels": Inert("It says with which code transformers computes the same."),
        "num_logits_to_keep": Inert("It says what a call returns."),
        "residual_in_fp32": Inert("Its class does not read it."),
        "sliding_window": Only(OFF, "windows of Nemotron-H are not served"),
        "hidden_dropout": Inert("Its class does not read it."),
        **dict.fromkeys(
            (
                *("n_routed_experts", "num_local_experts", "n_shared_experts", "moe_intermediate_size"),
                *("moe_shared_expert_intermediate_size", "moe_latent_size", "moe_shared_expert_overlap"),
                *("num_experts_per_tok", "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob"),
                "output_router_logits",
            ),
            _NO_EXPERTS,
        ),
        **dict.fromkeys(
            ("rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor"),
            _NO_POSITIONS,
        ),
        "original_max_position_embeddings": _NO_POSITIONS,
        **dict.fromkeys(
            ("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
            _FURTHER,
        ),
    },
    epsilon="layer_norm_epsilon",
    variant=lambda said: Variant(activation="relu2", gated=False),
    hybrid=_hybrid,
    others=("mtp.",),
    weights=WeightMap(
        attention_norm="norm",
        query_key_value=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        attention_output="mixer.o_proj",
        mlp_norm="norm",
        gate_up=("mixer.up_proj",),
        down="mixer.down_proj",
        recurrent=RecurrentMap(place="mixer", projections=(("in_proj", 5),)),
        own_mlps=True,
        embedding="model.embeddings.weight",
        final_norm="model.norm_f.weight",
        old_body="backbone",
    ),
)
