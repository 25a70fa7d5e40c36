"""Models that differ outside core attention: those of Megatron-Core's own fields, and those of our options."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.activations import squared_relu
from megatron.core.transformer import TransformerConfig
from torch.nn.functional import gelu

from distca.models.rope import RopeScaling
from distca.parity.cases import LENGTHS, ParityCase, ParityShape, Recompute
from megatron_patches.model.model_options import ModelOptions, QueryScaling, Rotary

_GELU = {"activation_func": partial(gelu, approximate="tanh"), "bias_activation_fusion": False}
_ALTERNATE = {"window_size": (6, 0), "window_attn_skip_freq": 2}
_YARN = RopeScaling(kind="yarn", factor=4.0, original_length=16)


def megatron_variants(tp: int, pp: int = 1) -> list[ParityCase]:
    """Cases that Megatron's configuration and GPTModel have fields for, held against unmodified Megatron."""
    no_gate = {"activation_func": squared_relu, "gated_linear_unit": False, "bias_activation_fusion": False}
    models: list[dict[str, Any]] = [
        {"config": {"no_rope_freq": 2, **_GELU}},
        {"config": {"rotary_interleaved": True, "qk_layernorm": True}, "rotary_percent": 0.5},
        {"config": {"normalization": "LayerNorm", "add_qkv_bias": True, **no_gate}, "rotary_percent": 0.75},
        {"config": {"no_rope_freq": [1, 0, 0, 1], "normalization": "LayerNorm", **_ALTERNATE}},
    ]
    if hasattr(TransformerConfig, "use_mup"):  # from version 0.17 on
        scaled = {"use_mup": True, "mup_base_hidden_size": 8, "mup_embedding_mult": 3.0, "mup_attn_scale_power": 0.9}
        models.append({"config": scaled})
    return _cases(models, tp, pp)


def option_variants(tp: int, pp: int = 1) -> list[ParityCase]:
    """Cases that Megatron lacks, combined as models in use have them, held against the plain model."""
    local = Rotary(base=100.0)
    models: list[dict[str, Any]] = [
        {  # Gemma 2
            "config": {"layernorm_zero_centered_gamma": True, **_GELU, **_ALTERNATE},
            "options": ModelOptions(norms="both", embedding_scale=32**0.5, score_softcap=1.5, final_softcap=2.0),
            "tie_embeddings": True,
        },
        {  # Gemma 3
            "config": {"layernorm_zero_centered_gamma": True, "qk_layernorm": True, **_GELU, **_ALTERNATE},
            "options": ModelOptions(norms="both", rotations=(local, None, local, None), embedding_scale=5.7),
            "shape": ParityShape(layers=4, rope_scaling=RopeScaling(kind="linear", factor=8.0)),
        },
        {  # OLMo 3
            "config": {"qk_layernorm": True, **_ALTERNATE},
            "options": ModelOptions(
                norms="post", query_key_norm="width", rotations=(None, Rotary(base=1e4, scaling=_YARN)) * 2
            ),
        },
        {  # Granite 3, with biases in attention
            "config": {"softmax_scale": 0.2, "add_qkv_bias": True},
            "options": ModelOptions(
                attention_output_bias=True, embedding_scale=12.0, residual_multiplier=0.22, logit_multiplier=1 / 16
            ),
            "tie_embeddings": True,
        },
        {  # Cohere 2
            "config": {"normalization": "LayerNorm", "rotary_interleaved": True, "no_rope_freq": 2, **_ALTERNATE},
            "options": ModelOptions(
                norm_bias=False,
                parallel_mlp=True,
                logit_multiplier=0.25,
                rotations=(Rotary(base=1e4, scaling=_YARN, percent=0.5), None) * 2,
            ),
        },
        {  # Hunyuan's norms, and positions that go by the length of each document
            "config": {"qk_layernorm": True},
            "options": ModelOptions(
                norm_after_rotation=True,
                rotations=(
                    None,
                    Rotary(base=1e3, scaling=RopeScaling(kind="dynamic", factor=2.0, original_length=8), percent=0.5),
                )
                * 2,
            ),
        },
        {  # gpt-oss's attention, and queries scaled as in Ministral 3
            "config": {"add_qkv_bias": True, "softmax_type": "learnable", **_ALTERNATE},
            "options": ModelOptions(
                attention_output_bias=True, query_scaling=QueryScaling(beta=0.3, original_length=8), score_softcap=3.0
            ),
            "shape": ParityShape(layers=4, rope_scaling=_YARN),
        },
    ]
    return _cases(models, tp, pp)


def by_length(case: ParityCase) -> bool:
    """Rotary positions go by the documents' lengths, which a block alone is not told."""
    return any(each is not None and each.scaling.by_length for each in case.options.rotations)


def _cases(models: list[dict[str, Any]], tp: int, pp: int) -> list[ParityCase]:
    levels: tuple[Recompute, ...] = ("none", "all", "mlp")
    return [
        ParityCase(
            **{
                "micro_batches": LENGTHS,
                "tp": tp,
                "pp": pp,
                "backward": "resend" if pp > 1 or number % 2 else "keep",
                "ping_pong": number % 3 < 2,
                "recompute": levels[number % 3],
                "shape": ParityShape(layers=4),
                **model,
            }
        )
        for number, model in enumerate(models)
    ]
