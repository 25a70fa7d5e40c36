"""Model types that are not served, and what no family here has of their layers.

A type is not in the table where other families have all of its parts, and only its own description is missing.
"""

from __future__ import annotations

from typing import Final

_EXPERTS = "its own names and fields of experts"
_OWN_CODE = "code of its own"
_MAMBA1 = "Mamba-1"
_NORM_BIASES = "LayerNorms with biases"
_OWN_POSITIONS = "positions that are not rotary, and " + _NORM_BIASES

UNSERVED: Final[dict[str, str]] = {
    "qwen2_moe": _EXPERTS,
    "granitemoe": _EXPERTS,
    "phimoe": _EXPERTS,
    "dbrx": _EXPERTS,
    "dots1": _EXPERTS,
    "hunyuan_v1_moe": _EXPERTS,
    "ernie4_5_moe": _EXPERTS,
    "minimax_m2": _EXPERTS,
    "deepseek_v2": "routers by softmax with groups",
    "deepseek_v32": "indexers of keys",
    "kimi_k2": _OWN_CODE,
    "longcat_flash": "two attentions in a layer and experts without weights",
    "mistral4": "latent attention by this class",
    "minicpm3": "latent attention by this class, and the names of its multipliers",
    "minicpm": _OWN_CODE,
    "internlm2": "one tensor of q, k and v with groups of heads inside, and code of its own",
    "internlm3": "biases of all projections by settings of its own, and code of its own",
    "mimo": "layers that predict several tokens at a time (multi-token prediction)",
    "olmo": "norms without weights",
    "cohere": "norms of query and key heads that are LayerNorms",
    "exaone": _OWN_CODE,
    "nemotron": _NORM_BIASES,
    "apertus": "activations by xIELU",
    "phi": _NORM_BIASES,
    "starcoder2": _NORM_BIASES,
    "stablelm": _NORM_BIASES,
    "falcon": _NORM_BIASES,
    "gpt_neox": _NORM_BIASES,
    "gpt2": _OWN_POSITIONS,
    "opt": _OWN_POSITIONS,
    "bloom": _OWN_POSITIONS,
    "mpt": _OWN_POSITIONS,
    "baichuan": "one tensor of q, k and v, and code of its own",
    "chatglm": _OWN_CODE,
    "qwen": "one tensor of q, k and v, and code of its own",
    "llama4": "chunks of attention, and experts whose inputs are multiplied by their scores",
    "llama4_text": "chunks of attention, and experts whose inputs are multiplied by their scores",
    "gemma4": "heads of 512, and keys that are values",
    "jamba": _MAMBA1,
    "mamba": _MAMBA1,
    "mamba2": "stacks without attention",
    "falcon_h1": "attention and Mamba-2 side by side",
    "qwen2_vl": "positions of images",
    "qwen2_5_vl": "positions of images",
    "qwen3_vl": "positions of images",
}
"""The missing feature, as the end of a sentence, by model type."""
