"""The families of models that are served, a table each: a new one is a table of fields and a map of weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

from distca.models.families.family import Composite, Family
from distca.models.families.gemma import GEMMA2, GEMMA3, GEMMA3_IMAGES
from distca.models.families.gpt_oss import GPT_OSS
from distca.models.families.llama import LLAMA, MINISTRAL, MINISTRAL3, MISTRAL, MISTRAL3, SEED_OSS
from distca.models.families.llama_like import ARCEE, ERNIE4_5, GRANITE, HUNYUAN, PHI3, QWEN2, QWEN3, SMOLLM3
from distca.models.families.mixtures import MIXTRAL, OLMOE, QWEN3_MOE
from distca.models.families.nemotron_hybrid import NEMOTRON_H
from distca.models.families.other_blocks import COHERE2, EXAONE4, GLM4, OLMO2, OLMO3
from distca.models.families.qwen_hybrid import (
    QWEN3_5,
    QWEN3_5_IMAGES,
    QWEN3_5_MOE,
    QWEN3_5_MOE_IMAGES,
    QWEN3_NEXT,
)
from distca.models.families.sigmoid_experts import DEEPSEEK_V3, GLM4_MOE

FAMILIES: Final[Mapping[str, Family]] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "phi3": PHI3,
    "ministral": MINISTRAL,
    "seed_oss": SEED_OSS,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "smollm3": SMOLLM3,
    "granite": GRANITE,
    "ministral3": MINISTRAL3,
    "cohere2": COHERE2,
    "exaone4": EXAONE4,
    "glm4": GLM4,
    "ernie4_5": ERNIE4_5,
    "hunyuan_v1_dense": HUNYUAN,
    "gpt_oss": GPT_OSS,
    "arcee": ARCEE,
    "qwen3_moe": QWEN3_MOE,
    "mixtral": MIXTRAL,
    "olmoe": OLMOE,
    "glm4_moe": GLM4_MOE,
    "qwen3_5_text": QWEN3_5,
    "nemotron_h": NEMOTRON_H,
    "deepseek_v3": DEEPSEEK_V3,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "qwen3_next": QWEN3_NEXT,
}
COMPOSITES: Final[Mapping[str, Composite]] = {
    "mistral3": MISTRAL3,
    "gemma3": GEMMA3_IMAGES,
    "qwen3_5": QWEN3_5_IMAGES,
    "qwen3_5_moe": QWEN3_5_MOE_IMAGES,
}


@cache
def known_fields() -> frozenset[str]:
    """Names of fields that some configuration class of transformers has, as tests/models/known_fields.py wrote them."""
    return frozenset(json.loads((Path(__file__).parent / "known_fields.json").read_text(encoding="utf-8")))
