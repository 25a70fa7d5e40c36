"""gpt-oss: sinks, windows in every other layer, YaRN, and experts with biases; or a dense MLP in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from distca.errors import ModelError
from distca.models.experts import Experts
from distca.models.families.common import SHAPE
from distca.models.families.family import Family
from distca.models.families.mixtures import BALANCE
from distca.models.fields import Inert, Only, Read
from distca.models.variant import Variant
from distca.models.weight_map import ExpertMap, WeightMap


def _experts(said: Mapping[str, Any]) -> Experts:
    """Experts; none where a folder says 0 of them, which has a dense MLP by LLaMA's names."""
    if not said["num_local_experts"]:
        return Experts()
    if not said["attention_bias"]:
        raise ModelError("attention_bias is false, but beside experts with biases those of attention are true here.")
    return Experts(
        count=said["num_local_experts"],
        topk=said["num_experts_per_tok"],
        ffn=said["intermediate_size"],
        biases=True,
        clamp=said["swiglu_limit"],
    )


GPT_OSS: Final = Family(
    architecture="GptOssForCausalLM",
    fields=SHAPE
    | BALANCE
    | {
        "num_key_value_heads": Read("count", 8, optional=True),
        "head_dim": Read("count", 64, optional=True),
        "max_position_embeddings": Read("count", 131072),
        "rms_norm_eps": Read("number", 1e-5),
        "attention_bias": Read("switch", True),
        "sliding_window": Read("count", 128),
        "layer_types": Read("texts", None, optional=True),
        "num_local_experts": Read("index", 128),
        "num_experts": Only((None,), "the field of this class has another name, num_local_experts; rename it"),
        "num_experts_per_tok": Read("count", 4),
        "experts_per_token": Inert("Its class reads num_experts_per_tok."),
        "swiglu_alpha": Only((1.702,), "gates are multiplied by 1.702 in their sigmoid here"),
        "swiglu_limit": Read("number", 7.0),
        "initial_context_length": Inert("The context of the first training is read from the scaling."),
    },
    quantised="mxfp4",
    rope_base=150000.0,
    rope_default={
        **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        "original_max_position_embeddings": 4096,
    },
    windows="periodic",
    full_every=2,
    qkv_bias="attention_bias",
    sinks=True,
    variant=lambda said: Variant(attention_output_bias=said["attention_bias"]),
    experts=_experts,
    weights=WeightMap(
        experts=ExpertMap(router="mlp.router", gate_up=("gate_up_proj",), stacked=True, input_first=True)
    ),
)
