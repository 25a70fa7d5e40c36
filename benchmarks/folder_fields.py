"""Every field of a config.json moved off its default, one at a time, and public configurations: logits as transformers
has them, or a refusal.

    python -m benchmarks.folder_fields --output benchmarks/results/folders.json

For each served model type the fields are those of its class in transformers, and those that all classes have. Those of
other well-known models are judged, too. FOLDER has each verdict; the command fails where one is served with other
logits, or ends in a traceback. It runs on CPUs in a few minutes. With --kinds some model types are judged again, with
--fields some fields, and the verdicts on others stay as they are in the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from benchmarks.family_models import VISION_OF_QWEN
from benchmarks.folder_judge import LENGTHS, Verdict, judge
from benchmarks.public_configs import PUBLIC, Public, shrunk
from distca.models.families import COMPOSITES, FAMILIES
from distca.models.families.common import COMMON, ELSEWHERE
from distca.versions import command_line, header, write_report

_ROPE = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = _ROPE | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_SCALINGS: list[Any] = [
    None,
    {"rope_type": "linear", "factor": 4.0},
    {"type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0},
    {"rope_type": "mrope", "mrope_section": [1, 1, 2]},
    _LLAMA3,
    _ROPE,
    *(
        _ROPE | more
        for more in (
            {"attention_factor": 1.3},
            {"beta_fast": 4.0, "beta_slow": 0.5},
            {"truncate": False},
            {"truncate": "false"},
            {"mscale": 1.5, "mscale_all_dim": 0.5},
            {"attn_factor": 0.8},
            {"partial_rotary_factor": 0.5},
            {"llama_4_scaling_beta": 0.1},
            {"finetuned": True},
            {"type": "linear"},
            {"factor": True},
            {"factor": float("nan")},
            {"rope_theta": None},
            {"rope_theta": float("inf")},
            {"rope_theta": 1.0},
        )
    ),
    {"full_attention": _ROPE, "sliding_attention": _ROPE},
    {"full_attention": _ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}},
    {"full_attention": _LLAMA3},
    {"sliding_attention": {"rope_theta": 50.0}},
    "yarn",
]
MOVES: dict[str, list[Any]] = {
    "hidden_size": [48, "32", 33, None],
    "intermediate_size": [40, 48.5],
    "num_hidden_layers": [3, 0, True],
    "num_attention_heads": [8, 2, 5],
    "num_key_value_heads": [1, 4, 3, None],
    "head_dim": [4, 16, 7, None],
    "vocab_size": [71, -1],
    "hidden_act": ["gelu", "swish", None],
    "max_position_embeddings": [16, 0],
    "rms_norm_eps": [1e-2, float("nan"), float("inf"), True, "1e-5"],
    "tie_word_embeddings": [True, "false", 1],
    "rope_theta": [500.0, 500, float("nan"), float("inf"), -1.0, "1e6"],
    "rope_parameters": _SCALINGS,
    "rope_scaling": _SCALINGS,
    "sliding_window": [8, 40, 39, None],
    "use_sliding_window": [True, "true"],
    "max_window_layers": [0, 1, 2],
    "layer_types": [
        *(["full_attention"] * 2, ["full_attention", "sliding_attention"], ["sliding_attention"] * 2),
        *(["full_attention"], ["linear_attention"] * 2, "full_attention"),
    ],
    "dtype": ["float16", "float8_e4m3fn", 16],
    "torch_dtype": ["float16"],
    "architectures": [["LlamaModel"], [], "LlamaForCausalLM"],
    "partial_rotary_factor": [0.5, 1.0],
    "original_max_position_embeddings": [16],
    "is_causal": [False, True],
    "is_decoder": [True],
    "no_rope_layers": [[0, 1], [1, 0], [1], [2, 1]],
    "no_rope_layer_interval": [1, 2],
    "sliding_window_pattern": [3, 1],
    "rope_local_base_freq": [500.0],
    "attention_multiplier": [0.2],
    "text_config": [{"hidden_size": 8}],
    "vision_config": [{"hidden_size": 8}],
    "per_layer_config": [{"0": {"hidden_act": "gelu"}}],
    "quantization_config": [{"quant_method": "fp8"}],
    "auto_map": [{"AutoModelForCausalLM": "code.Model"}],
    "layers_block_type": [["mamba", "attention", "mlp"], ["full_attention", "moe"], ["linear_attention"] * 2, None],
    "hybrid_override_pattern": ["M-*", "M+*"],
    "full_attention_interval": [2, 1],
    "linear_conv_kernel_dim": [3],
    "conv_kernel": [3],
    "time_step_min": [0.5, -1.0],
    "of_nobody": [1],
}
"""Values that fields are given; others get the opposite, a half more, or a text."""


def bases() -> dict[str, dict[str, Any]]:
    """A small configuration of each served model type; documents are longer than its positions."""
    small: dict[str, Any] = {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "vocab_size": 67, "max_position_embeddings": 64, "initializer_range": 0.3},
        **{"rms_norm_eps": 1e-5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    }
    hybrid: dict[str, Any] = {
        **{"head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
        **{
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 6,
        },
    }
    mixture = hybrid | {
        **{"num_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    }
    own: dict[str, dict[str, Any]] = {
        "mistral": {"sliding_window": None, "head_dim": 8},
        "ministral": {"sliding_window": max(LENGTHS), "head_dim": 8},
        "seed_oss": {"head_dim": 8},
        "gemma2": {"head_dim": 16, "sliding_window": 9},
        "gemma3_text": {"head_dim": 16, "sliding_window": 9, "sliding_window_pattern": 2},
        "olmo3": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
        "smollm3": {"no_rope_layers": [1, 0]},
        "ministral3": {"head_dim": 8, "rope_parameters": _ROPE | {"llama_4_scaling_beta": 0.3}},
        "cohere2": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
        "exaone4": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
        "glm4": {"head_dim": 16},
        "phi3": {"original_max_position_embeddings": 16},
        "ernie4_5": {"head_dim": 16},
        "hunyuan_v1_dense": {"head_dim": 8},
        "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "mixtral": {"num_local_experts": 4},
        "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
        "glm4_moe": {
            **{"head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 16},
            "use_qk_norm": True,
        },
        "deepseek_v3": {
            **{
                "num_key_value_heads": 4,
                "n_routed_experts": 8,
                "n_group": 1,
                "topk_group": 1,
                "num_experts_per_tok": 3,
            },
            **{"moe_intermediate_size": 16, "first_k_dense_replace": 1, "kv_lora_rank": 20, "q_lora_rank": 12},
            **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
        },
        "gpt_oss": {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 9},
            "rope_parameters": _ROPE,
        },
        "qwen3_5_text": hybrid,
        "qwen3_5_moe_text": mixture,
        "qwen3_next": mixture,
        "nemotron_h": {
            **{"head_dim": 8, "layers_block_type": ["linear_attention", "mlp", "full_attention"]},
            **{"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 6, "time_step_min": 0.1},
        },
    }
    found = {name: small | {"model_type": name} | own.get(name, {}) for name in FAMILIES}
    del found["nemotron_h"]["num_hidden_layers"]
    found["cohere2"]["layer_norm_eps"] = found["cohere2"].pop("rms_norm_eps")
    images = shrunk(PUBLIC["gemma-3-12b"].fields)
    images["text_config"] |= {"head_dim": 16, "sliding_window": 9, "sliding_window_pattern": 2}
    mistral = shrunk(PUBLIC["Mistral-Small-3.2-24B"].fields)
    qwen = {"vision_config": VISION_OF_QWEN, "tie_word_embeddings": False}
    vision_moe = VISION_OF_QWEN | {"model_type": "qwen3_5_moe_vision"}
    return found | {
        "mistral3": mistral | {"tie_word_embeddings": False},
        "gemma3": images,
        "qwen3_5": qwen | {"model_type": "qwen3_5", "text_config": found["qwen3_5_text"]},
        "qwen3_5_moe": qwen
        | {"model_type": "qwen3_5_moe", "text_config": found["qwen3_5_moe_text"], "vision_config": vision_moe},
    }


def moved() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field of every model type with each of its other values, by a name that says so."""
    for kind, base in bases().items():
        for field, default in sorted(_fields(kind).items()):
            for value in _values(field, default):
                yield f"{kind}, {field} {json.dumps(value)}", base | {field: value}
        if kind not in COMPOSITES:
            continue
        inside = COMPOSITES[kind].text
        for field, values in MOVES.items():
            for value in values:
                yield f"{kind}, {inside}.{field} {json.dumps(value)}", base | {inside: base[inside] | {field: value}}


def _fields(kind: str) -> dict[str, Any]:
    """Fields and their defaults: of the class, of all classes, and of other models."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    own = {field.name: field.default for field in dataclasses.fields(CONFIG_MAPPING[kind])}
    names = dict.fromkeys((*COMMON, *ELSEWHERE, *MOVES))
    return {name: default for name, default in (names | own).items() if name != "model_type"}


def _values(field: str, default: Any) -> list[Any]:
    if field in MOVES:
        return MOVES[field]
    if isinstance(default, bool):
        return [not default, str(default).lower()]
    if isinstance(default, int | float):
        return [default * 1.5 + 0.5 if isinstance(default, float) else default + 1]
    return [3] if field.endswith("_id") else [True, 0.5]


def kept(verdict: Verdict) -> dict[str, Any]:
    """A verdict as it is written."""
    return {name: value for name, value in dataclasses.asdict(verdict).items() if value}


def as_expected(public: Public, verdict: Verdict) -> bool:
    """Whether a public configuration is served with its warning, or refused for its reason."""
    if public.refused:
        return verdict.kind == "refused" and public.refused in verdict.said
    return (
        verdict.kind == "equal"
        and bool(public.warned) == bool(verdict.warnings)
        and public.warned in " ".join(verdict.warnings)
    )


def _judged(kinds: Collection[str], fields: Collection[str], before: Path) -> dict[str, Verdict]:
    """The verdicts on every field. Those on other model types, and on others than ``fields``, are the file's, if it has
    them."""
    configs = dict(moved())
    again = {name: config for name, config in configs.items() if name.split(",")[0] in kinds}
    if fields:
        again = {name: config for name, config in again.items() if _field_of(name) in fields}
    kept = json.loads(before.read_text(encoding="utf-8"))["fields"] if len(again) < len(configs) else {}
    again |= {name: config for name, config in configs.items() if name not in kept}
    judged = judge(again)
    return {name: judged[name] if name in again else Verdict(**kept[name]) for name in configs}


def _field_of(name: str) -> str:
    """The field that is moved, by the name of a configuration."""
    return name.split(", ", 1)[1].split(" ", 1)[0].removeprefix("text_config.")


def main() -> None:
    """Write the report; exit code 1 where a verdict is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--kinds", nargs="+", default=[*FAMILIES, *COMPOSITES], help="model types that are judged")
    parser.add_argument("--fields", nargs="+", default=(), help="fields that are judged; all if left out")
    asked = parser.parse_args()
    fields = _judged(asked.kinds, asked.fields, asked.output)
    public = judge({name: shrunk(each.fields) for name, each in PUBLIC.items()})
    wrong = [name for name, verdict in fields.items() if verdict.kind in ("different", "traceback")]
    wrong += [name for name, verdict in public.items() if not as_expected(PUBLIC[name], verdict)]
    counts = {
        name: dict(Counter(each.kind for each in some.values()))
        for name, some in (("fields", fields), ("public", public))
    }
    report = {
        **header(command_line("python -m benchmarks.folder_fields"), 1),
        "counts": counts,
        "wrong": wrong,
        "public": {name: kept(verdict) for name, verdict in public.items()},
        "fields": {name: kept(verdict) for name, verdict in fields.items()},
    }
    write_report(asked.output, report)
    sys.stdout.write(json.dumps({"counts": counts, "wrong": wrong}, indent=2) + "\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
