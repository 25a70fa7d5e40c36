"""gpt-oss: sinks, windows in every other layer and YaRN; with a dense MLP where its models have experts."""

from __future__ import annotations

from typing import Final

from distca.models.families.common import SHAPE
from distca.models.families.family import Family
from distca.models.fields import OFF, Inert, Only, Read
from distca.models.variant import Variant

_EXPERTS = "mixtures of experts are not served; 0 is a dense MLP in their place"
_ROUTED = Inert("It belongs to experts, of which there are none.")

GPT_OSS: Final = Family(
    architecture="GptOssForCausalLM",
    fields=SHAPE
    | {
        "num_key_value_heads": Read("count", 8, optional=True),
        "head_dim": Read("count", 64, optional=True),
        "max_position_embeddings": Read("count", 131072),
        "rms_norm_eps": Read("number", 1e-5),
        "attention_bias": Read("switch", True),
        "sliding_window": Read("count", 128),
        "layer_types": Read("texts", None, optional=True),
        "num_local_experts": Only((0,), _EXPERTS, default=128),
        "num_experts": Only(OFF, _EXPERTS),
        "num_experts_per_tok": _ROUTED,
        "experts_per_token": _ROUTED,
        "router_aux_loss_coef": _ROUTED,
        "output_router_logits": Only(OFF, "there is no router whose logits could be returned"),
        "swiglu_alpha": _ROUTED,
        "swiglu_limit": _ROUTED,
        "initial_context_length": Inert("The context of the first training is read from the scaling."),
    },
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
)
