"""Mixtures of experts: Qwen3-MoE, Mixtral and OLMoE, whose attention is that of a dense family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from distca.errors import ModelError
from distca.models.experts import Experts
from distca.models.families.common import SHAPE
from distca.models.families.family import Family
from distca.models.fields import OFF, Field, Inert, LeftOut, Only, Read
from distca.models.variant import Variant
from distca.models.weight_map import ExpertMap, WeightMap

BALANCE: Final[dict[str, Field]] = {
    "router_aux_loss_coef": Inert("How experts are balanced is a setting of the run: model.experts.balance."),
    "output_router_logits": LeftOut(
        "with which transformers adds a loss that balances experts; set model.experts.balance for one",
        default=False,
    ),
}
"""The fields of losses that balance experts."""
_OTHER_NAME = Only((None,), "the field of this class has another name; rename it")


def _dense_layers(said: Mapping[str, Any]) -> int:
    """Layers before the first one with experts, in a Qwen3-MoE that says which have an MLP instead."""
    dense = sorted(set(said["mlp_only_layers"] or ()))
    layers, step = said["num_hidden_layers"], said["decoder_sparse_step"]
    dense = [layer for layer in range(layers) if layer in dense or (layer + 1) % step]
    if dense != list(range(len(dense))):
        raise ModelError(
            f"layers {dense} have an MLP in place of experts (mlp_only_layers, decoder_sparse_step), but only the "
            "first layers of a model can here."
        )
    return len(dense)


QWEN3_MOE: Final = Family(
    architecture="Qwen3MoeForCausalLM",
    fields=SHAPE
    | BALANCE
    | {
        "num_key_value_heads": Read("count", 4, optional=True),
        "max_position_embeddings": Read("count", 32768),
        "rms_norm_eps": Read("number", 1e-6),
        "attention_bias": Read("switch", False),
        "use_sliding_window": Only(OFF, "Qwen3-MoE is served without windows"),
        "sliding_window": Inert("use_sliding_window says whether there is one."),
        "max_window_layers": Inert("Its class does not read it."),
        "decoder_sparse_step": Read("count", 1),
        "mlp_only_layers": Read("indices", None, optional=True),
        "moe_intermediate_size": Read("count", 768),
        "num_experts_per_tok": Read("count", 8),
        "num_experts": Read("count", 128),
        "num_local_experts": Read("count", None),
        "norm_topk_prob": Read("switch", False),
    },
    quantised="fp8",
    qkv_bias="attention_bias",
    qk_norm=True,
    variant=lambda said: Variant(attention_output_bias=said["attention_bias"]),
    experts=lambda said: Experts(
        count=said["num_local_experts"] or said["num_experts"],  # version 5 writes, and prefers, the first of them
        topk=said["num_experts_per_tok"],
        ffn=said["moe_intermediate_size"],
        dense_layers=_dense_layers(said),
        normalize=said["norm_topk_prob"],
    ),
)

MIXTRAL: Final = Family(
    architecture="MixtralForCausalLM",
    fields=SHAPE
    | BALANCE
    | {
        "num_key_value_heads": Read("count", 8, optional=True),
        "max_position_embeddings": Read("count", 4096 * 32),
        "rms_norm_eps": Read("number", 1e-5),
        "sliding_window": Read("count", None, optional=True),
        "num_experts_per_tok": Read("count", 2),
        "num_local_experts": Read("count", 8),
        "num_experts": _OTHER_NAME,
        "router_jitter_noise": Only(OFF, "what routers read has no noise here; set it to 0"),
    },
    rope_base=1000000.0,
    windows="every",
    experts=lambda said: Experts(
        count=said["num_local_experts"], topk=said["num_experts_per_tok"], ffn=said["intermediate_size"]
    ),
    weights=WeightMap(
        experts=ExpertMap(
            router="block_sparse_moe.gate", experts="block_sparse_moe.experts", gate_up=("w1", "w3"), down="w2"
        )
    ),
)

OLMOE: Final = Family(
    architecture="OlmoeForCausalLM",
    fields=SHAPE
    | BALANCE
    | {
        "num_key_value_heads": Read("count", None, optional=True),
        "max_position_embeddings": Read("count", 4096),
        "rms_norm_eps": Read("number", 1e-5),
        "attention_bias": Read("switch", False),
        "clip_qkv": Only((None,), "queries, keys and values have no limits here"),
        "num_experts_per_tok": Read("count", 8),
        "num_experts": Read("count", 64),
        "num_local_experts": _OTHER_NAME,
        "norm_topk_prob": Read("switch", False),
    },
    qkv_bias="attention_bias",
    qk_norm=True,
    variant=lambda said: Variant(query_key_norm="width", attention_output_bias=said["attention_bias"]),
    experts=lambda said: Experts(
        count=said["num_experts"],
        topk=said["num_experts_per_tok"],
        ffn=said["intermediate_size"],
        normalize=said["norm_topk_prob"],
    ),
)
