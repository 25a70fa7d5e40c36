"""What config.json describes, in the versions of transformers that write it, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distca.errors import ModelError
from distca.models.description import describe, describe_folder, family_of
from distca.models.exported_config import config_fields
from distca.models.rope import RopeScaling
from distca.models.shape import ModelShape

# As the folders of Llama-3.1-8B, Mistral-7B-v0.3, Qwen2.5-7B and Qwen3-8B have them.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MISTRAL = LLAMA | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "rope_scaling": None,
    "rope_theta": 1000000.5,
    "sliding_window": None,
    "head_dim": None,
}
QWEN2 = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rope_scaling": None,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
QWEN3 = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "use_sliding_window": False,
    "sliding_window": None,
}


def _described(fields: dict[str, Any], **changed: Any):
    return describe(fields | changed, "config.json")


def test_llama() -> None:
    model = _described(LLAMA)
    assert (model.layers, model.hidden, model.ffn, model.heads, model.kv_heads) == (32, 4096, 14336, 32, 8)
    assert (model.head_dim, model.vocabulary, model.positions, model.dtype) == (128, 128256, 131072, "bfloat16")
    assert not (model.qkv_bias or model.qk_norm or model.tie_embeddings) and model.norm_epsilon == 1e-5
    assert model.rope_base == 500000 and model.rope_scaling == RopeScaling(
        kind="llama3", factor=8, original_length=8192, low_freq_factor=1, high_freq_factor=4
    )


def test_llama_without_query_groups() -> None:
    fields = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert _described(fields).kv_heads == 32


def test_the_other_families() -> None:
    mistral, qwen2, qwen3 = (_described(fields) for fields in (MISTRAL, QWEN2, QWEN3))
    assert mistral.rope_base == 1000000.5 and mistral.rope_scaling == RopeScaling(original_length=131072)
    assert qwen2.qkv_bias and not qwen2.qk_norm and qwen3.qk_norm and not qwen3.qkv_bias
    assert qwen3.head_dim == 128 and _described(QWEN3, hidden_size=1024, head_dim=64).head_dim == 64
    assert qwen3.rope_scaling.resolved_attention_factor == pytest.approx(1.1386294361)


@pytest.mark.parametrize("fields", [LLAMA, MISTRAL, QWEN3], ids=["llama3", "none", "yarn"])
def test_version_5_says_the_same_in_rope_parameters(fields: dict[str, Any]) -> None:
    newer = {name: value for name, value in fields.items() if name not in ("rope_theta", "rope_scaling")}
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": fields["rope_theta"]} | (
        fields["rope_scaling"] or {}
    )
    assert _described(newer) == _described(fields)


def test_scaling_of_earlier_versions() -> None:
    linear = _described(MISTRAL, rope_scaling={"type": "linear", "factor": 4})
    assert linear.rope_scaling.kind == "linear" and linear.rope_scaling.factor == 4
    dynamic = _described(MISTRAL, rope_scaling={"type": "dynamic", "factor": 2}, max_position_embeddings=4096)
    assert dynamic.rope_scaling.original_length == 4096
    inferred = _described(QWEN3, rope_scaling={"type": "yarn", "original_max_position_embeddings": 32768})
    assert inferred.rope_scaling.factor == 4


def test_a_window_that_no_layer_uses_is_none() -> None:
    for described in (
        _described(QWEN2),
        _described(QWEN2, use_sliding_window=True, max_window_layers=32),
        _described(QWEN3, layer_types=["full_attention"] * 32, sliding_window=4096),
        _described(MISTRAL),
    ):
        assert (described.layer_types, described.window) == (["full"], 0)


def test_the_window_of_layers_that_have_one() -> None:
    some = _described(QWEN2, use_sliding_window=True)
    assert some.window == 131072 and some.layer_types == ["full"] * 28 + ["window"] * (some.layers - 28)
    assert _described(MISTRAL, sliding_window=4096).layer_types == ["window"]
    assert _described(MISTRAL, sliding_window=4096).window == 4096
    assert _described({name: value for name, value in MISTRAL.items() if name != "sliding_window"}).window == 4096
    # MistralForCausalLM knows neither of these, and takes the window in all layers.
    assert _described(MISTRAL, sliding_window=4096, use_sliding_window=False).window == 4096
    assert _described(MISTRAL, sliding_window=4096, layer_types=["full_attention"] * 32).window == 4096


@pytest.mark.parametrize(
    ("fields", "changed", "said"),
    [
        (LLAMA, {"model_type": "qwen2_moe"}, "has model_type 'qwen2_moe', but served are llama, mistral, qwen2, qwen3"),
        (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "only LlamaForCausalLM is served"),
        (
            LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            "weight_block_size [64, 64], but quantised weights are read as fp8 only, FP8 in blocks of 128",
        ),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantised weights cannot be trained"),
        (
            QWEN3,
            {"num_experts": 8},
            "has num_experts 8, but the class of this model type in transformers has no such experts",
        ),
        (LLAMA, {"kv_lora_rank": 512}, "in transformers has no latent attention"),
        (LLAMA, {"hidden_act": "gelu"}, "has hidden_act 'gelu', but only silu"),
        (QWEN2, {"mlp_bias": True}, "has mlp_bias, but the class of this model type in transformers has no such"),
        (LLAMA, {"attention_dropout": 0.1}, "has attention_dropout 0.1"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "has partial_rotary_factor 0.5"),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "has layer_types of 2 layers, but"),
        (QWEN3, {"layer_types": ["full_attention"] * 31 + ["sliding_attention"]}, "but no window for them: "),
        (MISTRAL, {"layer_types": ["linear_attention"] * 32}, "has layers of linear_attention"),
        (QWEN3, {"layer_types": ["full_attention"] * 31 + ["linear_attention"]}, "has layers of linear_attention"),
        (LLAMA, {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "has 'longrope' in rope_scaling, but served"),
        (LLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "by kind of layer"),
        (
            LLAMA,
            {"rope_parameters": {"rope_type": "yarn", "factor": 2, "llama_4_scaling_beta": 0.1}},
            "queries of this model type are not scaled by their position",
        ),
        (LLAMA, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, "has no factor"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5; it must be a number of at"),
        (
            LLAMA,
            {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "kind is dynamic, but positions turn 2 elements of a head, and its base needs at least 4.",
        ),
        (LLAMA, {"hidden_size": None}, "has no hidden_size, without which"),
        (LLAMA, {"num_hidden_layers": "many"}, "has num_hidden_layers 'many'; it must be a whole number"),
        (LLAMA, {"rms_norm_eps": None}, "has no rms_norm_eps"),
        (QWEN2, {"num_key_value_heads": None}, "has no num_key_value_heads"),
        (LLAMA, {"num_key_value_heads": 7}, "has 32 query heads, which 7 key and value heads do not divide"),
        (LLAMA, {"num_attention_heads": 33}, "has hidden_size 4096, which 33 heads do not divide"),
        (LLAMA, {"head_dim": 65}, "has heads of 65, but rotary positions need an even"),
    ],
)
def test_what_is_not_served_is_a_sentence(fields: dict[str, Any], changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as refused:
        _described(fields, **changed)
    assert said in str(refused.value) and "config.json" in str(refused.value) and str(refused.value).endswith(".")


def test_folders_without_a_readable_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is no folder"):
        describe_folder(tmp_path / "missing")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        describe_folder(tmp_path)
    deep = '{"a": ' + "[" * 3000 + "]" * 3000 + "}"
    for content, said in (("{", "is no JSON"), ("[]", "holds a list"), (deep, "is no JSON")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ModelError, match=said):
            describe_folder(tmp_path)


@pytest.mark.parametrize("fields", [LLAMA, MISTRAL, QWEN2, QWEN3], ids=lambda fields: fields["model_type"])
@pytest.mark.parametrize("first", [True, False])
def test_what_is_written_describes_the_same(fields: dict[str, Any], first: bool) -> None:
    model = _described(fields)
    written = json.loads(json.dumps(config_fields(model, "bfloat16", fields | {"eos_token_id": 7} if first else {})))
    assert describe(written, "config.json").rope_scaling.resolved_attention_factor == (
        model.rope_scaling.resolved_attention_factor
    )
    again = describe(written | {"rope_scaling": fields["rope_scaling"]}, "config.json")
    assert again == model and written.get("eos_token_id") == (7 if first else None)


def test_families_by_what_their_layers_have() -> None:
    plain = ModelShape(layers=1, hidden=64, ffn=64, heads=4, kv_heads=1)
    of = {(bias, norm): family_of(replace(plain, qkv_bias=bias, qk_norm=norm)) for bias in (0, 1) for norm in (0, 1)}
    assert of == {(0, 0): "llama", (1, 0): "qwen2", (0, 1): "qwen3", (1, 1): None}


def test_what_was_extended_once_can_be_extended_again() -> None:
    """The attention factor of an extension follows its factor, unless the first folder says it."""
    written = config_fields(_described(QWEN3), "bfloat16", QWEN3)
    assert "attention_factor" not in written["rope_scaling"]
    own = QWEN3 | {"rope_scaling": QWEN3["rope_scaling"] | {"attention_factor": 1.5}}
    assert config_fields(_described(own), "bfloat16", own)["rope_scaling"]["attention_factor"] == 1.5
