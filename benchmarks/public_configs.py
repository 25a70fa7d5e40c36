"""The settings of public models' config.json by name, from ``public_configs.json``, and why some are refused.

Sizes are those of the models; ``shrunk`` makes them small and keeps everything else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.family_models import VISION_OF_QWEN


class Public(NamedTuple):
    """A model's configuration.

    Attributes:
        fields: of its config.json.
        refused: what the sentence says with which it is refused; empty where it is served.
        warned: what a warning about it says; empty where there is none.
    """

    fields: dict[str, Any]
    refused: str = ""
    warned: str = ""


PUBLIC = {
    name: Public(**kept)
    for name, kept in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")).items()
}
_SMALL: dict[str, int] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 67,
}
_VISION = {
    **{"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14},
}


def shrunk(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same with small sizes, where heads share keys as they did, and ids of tokens that the vocabulary has."""
    if "text_config" in fields:
        several = "qwen" in fields["model_type"]
        vision = (VISION_OF_QWEN if several else _VISION) | {"model_type": fields["vision_config"]["model_type"]}
        tokens = {"mm_tokens_per_image": 4} if "mm_tokens_per_image" in fields else {}
        return dict(fields) | {"text_config": shrunk(fields["text_config"]), "vision_config": vision} | tokens
    groups = min(fields["num_attention_heads"] // fields["num_key_value_heads"], 4)
    small = dict(fields) | _SMALL | {"num_key_value_heads": 4 // groups, "initializer_range": 0.3}
    if "head_dim" in fields:
        small["head_dim"] = 16
    if "first_k_dense_replace" in fields:
        small["first_k_dense_replace"] = 1
    for name in ("layer_types", "no_rope_layers"):
        if name in fields:
            small[name] = fields[name][-_SMALL["num_hidden_layers"] :]
    if (small.get("rope_scaling") or {}).get("type") == "longrope":
        small["rope_scaling"] = fields["rope_scaling"] | {
            name: fields["rope_scaling"][name][: int(8 * small.get("partial_rotary_factor", 1)) // 2]
            for name in ("short_factor", "long_factor")
        }
    if small["model_type"] == "deepseek_v3":
        chosen = 3 if small["n_group"] == 1 else 2 * small["topk_group"]
        small |= {"n_routed_experts": 4 * small["n_group"], "num_experts_per_tok": chosen, "first_k_dense_replace": 1}
        small |= {"moe_intermediate_size": 16, "kv_lora_rank": 20, "q_lora_rank": small["q_lora_rank"] and 12}
        small |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    if "linear_num_key_heads" in fields:
        small |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        small |= {
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 6,
            "layer_types": ["linear_attention", "full_attention"],
        }
    if "shared_expert_intermediate_size" in fields:
        small |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        small |= {"shared_expert_intermediate_size": 16}
    if "hybrid_override_pattern" in fields:
        small |= {"hybrid_override_pattern": "M-*", "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2}
        small |= {"ssm_state_size": 6, "head_dim": 8, "num_hidden_layers": 3}
    if small["model_type"] in ("phi3", "smollm3", "glm4", "glm4_moe", "deepseek_v3"):
        small |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return small
