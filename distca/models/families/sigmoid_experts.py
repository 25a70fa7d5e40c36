"""Experts that are chosen by the sigmoid of their logits plus a bias: GLM-4.5 and DeepSeek-V3.

DeepSeek-V3's layers, which Moonlight has too, have latent attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from distca.errors import ModelError
from distca.models.experts import Experts
from distca.models.families.common import SHAPE
from distca.models.families.family import Family
from distca.models.families.mixtures import BALANCE
from distca.models.fields import OFF, Field, Inert, Only, Read
from distca.models.latent import Latent

_GROUP_SCORES: Final = 2
"""Scores of a group whose sum says whether it is chosen."""
_FURTHER: Final = ("num_nextn_predict_layers", "num_mtp_layers")
"""Fields with the number of layers that predict further tokens, the one that version 5 writes first."""

_SIGMOID: Final[dict[str, Field]] = BALANCE | {
    "num_experts_per_tok": Read("count", 8),
    "num_local_experts": Only((None,), "the field of this class has another name, n_routed_experts; rename it"),
    "n_shared_experts": Read("count", 1),
    "norm_topk_prob": Only((True,), "scores of a row's experts are normalised here"),
    "num_nextn_predict_layers": Read("index", None, optional=True),
    "num_mtp_layers": Read("index", 1),
}
"""The fields that both have with the same defaults."""


def _sigmoid_experts(said: Mapping[str, Any]) -> Experts:
    """Experts by the values of these fields. Their bias stays as it is, unless a run sets model.experts.bias_rate."""
    topk, groups, chosen = said["num_experts_per_tok"], said["n_group"], said["topk_group"]
    if groups > 1 and topk != _GROUP_SCORES * chosen:
        raise ModelError(
            f"num_experts_per_tok is {topk} and topk_group is {chosen}, but groups are chosen by as many scores as "
            f"each gives experts here, and by {_GROUP_SCORES} in transformers."
        )
    if topk == 1:
        raise ModelError("num_experts_per_tok is 1, but the score of one expert alone is not normalised here.")
    return Experts(
        count=said["n_routed_experts"],
        topk=topk,
        ffn=said["moe_intermediate_size"],
        dense_layers=said["first_k_dense_replace"],
        shared_ffn=said["n_shared_experts"] * said["moe_intermediate_size"],
        score="sigmoid",
        bias=True,
        bias_rate=0.0,
        groups=groups if groups > 1 else 0,
        chosen_groups=chosen if groups > 1 else 0,
        scale=said["routed_scaling_factor"],
    )


GLM4_MOE: Final = Family(
    architecture="Glm4MoeForCausalLM",
    fields=SHAPE
    | _SIGMOID
    | {
        "num_key_value_heads": Read("count", 8, optional=True),
        "max_position_embeddings": Read("count", 131072),
        "rms_norm_eps": Read("number", 1e-5),
        "attention_bias": Read("switch", False),
        "use_qk_norm": Read("switch", False),
        "partial_rotary_factor": Read("number", None, optional=True),
        "moe_intermediate_size": Read("count", 1408),
        "n_routed_experts": Read("count", 128),
        "routed_scaling_factor": Read("number", 1.0),
        "n_group": Read("count", 1),
        "topk_group": Read("count", 1),
        "first_k_dense_replace": Read("index", 1),
    },
    rotary_percent=None,
    rotary_default=0.5,
    qkv_bias="attention_bias",
    qk_norm="use_qk_norm",
    experts=_sigmoid_experts,
    further_layers=_FURTHER,
)

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
    | _SIGMOID
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
    experts=_sigmoid_experts,
    latent=_latent,
    further_layers=_FURTHER,
    quantised="fp8",
)
