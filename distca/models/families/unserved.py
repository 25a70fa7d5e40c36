"""Model types that are not served, and what of them is missing here."""

from __future__ import annotations

from typing import Final

_EXPERTS = "its own names and fields of experts"
_MULTIPLIERS = "multipliers of embeddings, residuals and logits"
_RECURRENT = "layers that are no attention"
_OWN_POSITIONS = "positions that are not rotary, and LayerNorm"

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
    "kimi_k2": "code of its own",
    "longcat_flash": "two attentions in a layer and experts without weights",
    "mistral4": "latent attention by this class",
    "minicpm3": "multi-head latent attention and " + _MULTIPLIERS,
    "minicpm": _MULTIPLIERS,
    "internlm2": "one tensor of q, k and v with groups of heads inside, and code of its own",
    "internlm3": "biases of all projections by settings of its own, and code of its own",
    "mimo": "layers that predict several tokens at a time (multi-token prediction)",
    "gemma": "norms around one, a scaled embedding and GELU",
    "olmo": "norms without weights",
    "cohere": "attention and MLP side by side, LayerNorm and a scale of logits",
    "exaone": "code of its own",
    "glm": "rotary positions of half a head, which turn neighbours",
    "nemotron": "an MLP without a gate, and LayerNorm",
    "apertus": "an MLP without a gate",
    "phi": "attention and MLP side by side, and biases",
    "starcoder2": "LayerNorm, biases and an MLP without a gate",
    "stablelm": "LayerNorm and rotary positions of a part of a head",
    "falcon": "attention and MLP side by side, and LayerNorm",
    "gpt_neox": "attention and MLP side by side, and LayerNorm",
    "gpt2": _OWN_POSITIONS,
    "opt": _OWN_POSITIONS,
    "bloom": _OWN_POSITIONS,
    "mpt": _OWN_POSITIONS,
    "baichuan": "one tensor of q, k and v, and code of its own",
    "chatglm": "rotary positions of half a head, and code of its own",
    "qwen": "one tensor of q, k and v, and code of its own",
    "llama4": "chunks of attention, layers without rotary positions and mixtures of experts",
    "llama4_text": "chunks of attention, layers without rotary positions and mixtures of experts",
    "gemma4": "heads of 512, and keys that are values",
    "jamba": _RECURRENT,
    "mamba": _RECURRENT,
    "mamba2": _RECURRENT,
    "falcon_h1": _RECURRENT,
    "qwen2_vl": "positions of images",
    "qwen2_5_vl": "positions of images",
    "qwen3_vl": "positions of images",
}
"""The missing feature, as the end of a sentence, by model type."""
