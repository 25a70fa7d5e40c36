"""DeepSeek-V3's layers, which Moonlight has too: latent attention, and experts that are chosen as GLM-4.5's are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from distca.errors import ModelError
from distca.models.families.common import SHAPE
from distca.models.families.family import Family
from distca.models.families.sigmoid import FURTHER, SIGMOID, sigmoid_experts
from distca.models.fields import OFF, Field, Inert, Only, Read
from distca.models.latent import Latent

_NORM_EPSILON: Final = 1e-6
"""The epsilon of norms of latent rows in transformers, whatever rms_norm_eps says."""

_OWN_CODE: Final[dict[str, Field]] = {
    "scoring_func": Only(("sigmoid", None), "scores are sigmoids here"),
    "topk_method": Only(("noaux_tc", None), "experts are chosen by score plus bias here"),
    "moe_layer_freq": Only((1, None), "all layers behind the first ones have experts here"),
    "ep_size": Inert("How ranks share experts is a setting of the run."),
    "aux_loss_alpha": Inert("How experts are balanced is a setting of the run: model.experts.document_balance."),
    "seq_aux": Inert("How experts are balanced is a setting of the run: model.experts.document_balance."),
}
"""The fields that published folders have for the code that comes with them, and transformers does not read."""


def _latent(said: Mapping[str, Any]) -> Latent:
    heads, kv_heads = said["num_attention_heads"], said["num_key_value_heads"]
    if kv_heads not in (None, heads):
        raise ModelError(f"num_key_value_heads is {kv_heads}, but each of the {heads} heads has keys and values.")
    return Latent(
        kv_rank=said["kv_lora_rank"],
        q_rank=said["q_lora_rank"] or 0,
        key_dim=said["qk_nope_head_dim"],
        rotary_dim=said["qk_rope_head_dim"],
        value_dim=said["v_head_dim"],
        norm_epsilon=_NORM_EPSILON,
    )


DEEPSEEK_V3: Final = Family(
    architecture="DeepseekV3ForCausalLM",
    fields=SHAPE
    | SIGMOID
    | _OWN_CODE
    | {
        "num_key_value_heads": Read("count", 128, optional=True),
        "head_dim": Inert("Its class takes qk_rope_head_dim in its place."),
        "qk_head_dim": Inert("Its class adds up qk_nope_head_dim and qk_rope_head_dim."),
        "max_position_embeddings": Read("count", 4096),
        "rms_norm_eps": Read("number", 1e-6),
        "attention_bias": Only(OFF, "projections of latent attention have no biases here"),
        "rope_interleave": Only((True,), "neighbours in a head turn together here"),
        "kv_lora_rank": Read("count", 512),
        "q_lora_rank": Read("count", 1536, optional=True),
        "qk_nope_head_dim": Read("count", 128),
        "qk_rope_head_dim": Read("count", 64),
        "v_head_dim": Read("count", 128),
        "moe_intermediate_size": Read("count", 2048),
        "n_routed_experts": Read("count", 256),
        "routed_scaling_factor": Read("number", 2.5),
        "n_group": Read("count", 8),
        "topk_group": Read("count", 4),
        "first_k_dense_replace": Read("index", 3),
    },
    rope_kinds=("default", "yarn"),
    experts=sigmoid_experts,
    latent=_latent,
    further_layers=FURTHER,
    quantised="fp8",
)
