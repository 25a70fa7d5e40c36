"""The families' tables against transformers' configuration classes, and a sample of the fields of each."""

import dataclasses
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.family_models import write_folder
from benchmarks.folder_fields import as_expected, bases, moved
from benchmarks.folder_judge import judge
from benchmarks.public_configs import PUBLIC, shrunk
from distca.errors import ModelError
from distca.models.description import describe, describe_folder
from distca.models.exported_config import config_fields
from distca.models.families import COMPOSITES, FAMILIES, known_fields
from distca.models.families.common import COMMON
from distca.models.families.unserved import UNSERVED
from distca.models.fields import REQUIRED, Inert, LeftOut, Only, Read
from distca.models.layout import expected_shapes
from distca.models.rope import RopeScaling
from distca.train.config.cli import parse_run_config
from distca.train.config.initial import description_of
from tests.models.known_fields import fields_of, installed_fields


def test_every_field_of_every_class_of_transformers_is_known() -> None:
    assert installed_fields() <= known_fields(), "python -m tests.models.known_fields adds new ones"


@pytest.mark.parametrize("kind", [*FAMILIES, *COMPOSITES])
def test_every_field_of_a_familys_class_is_in_its_table(kind: str) -> None:
    table = {**COMMON, **(FAMILIES.get(kind) or COMPOSITES[kind]).fields}
    assert fields_of(kind) <= table.keys()


@pytest.mark.parametrize("kind", FAMILIES)
def test_where_a_field_is_missing_the_default_is_that_of_the_class(kind: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    defaults = {field.name: field.default for field in dataclasses.fields(CONFIG_MAPPING[kind])}
    for name, field in {**COMMON, **FAMILIES[kind].fields}.items():
        if name not in defaults or name in ("architectures", "dtype", "tie_word_embeddings", "rope_parameters"):
            continue
        if isinstance(field, Read) and field.default is not REQUIRED:
            assert field.default == defaults[name], name
        if isinstance(field, LeftOut):
            assert field.default == defaults[name], name
        if isinstance(field, Only):
            assert defaults[name] in field.values or defaults[name] == field.default, name


def test_what_generates_text_is_inert() -> None:
    from transformers import GenerationConfig

    names = GenerationConfig._get_default_generation_params()
    assert all(isinstance(COMMON.get(name), Inert) for name in names), sorted(names)


def test_a_type_is_served_or_not() -> None:
    assert not {*FAMILIES, *COMPOSITES} & UNSERVED.keys()
    for kind, missing in UNSERVED.items():
        with pytest.raises(ModelError) as refused:
            describe({"model_type": kind, "auto_map": {"AutoModel": "code.Model"}}, "config.json")
        assert str(refused.value).endswith(f"of its layers, {missing} are not.") and "auto_map" not in str(
            refused.value
        )


_YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
_SAMPLE = (
    *("llama, is_causal false", 'llama, tie_word_embeddings "false"', "llama, rms_norm_eps NaN", "llama, head_dim 16"),
    *("llama, rope_theta Infinity", "llama, attention_bias true", "llama, no_rope_layers [0, 1]"),
    *("llama, attn_logit_softcapping true", "llama, final_logit_softcapping true", "llama, of_nobody 1"),
    *(
        "mistral, sliding_window 39",
        "mistral, sliding_window 40",
    ),
    *("qwen2, max_window_layers 0", "qwen3, use_sliding_window true", "qwen3, head_dim null"),
    *("phi3, num_key_value_heads 1", "phi3, partial_rotary_factor 0.5", "phi3, resid_pdrop 0.5"),
    *("seed_oss, attention_bias false", "seed_oss, attention_out_bias true", "seed_oss, attention_dropout 0.65"),
    *("arcee, mlp_bias true", "gpt_oss, attention_bias false", "gpt_oss, swiglu_limit 11.0"),
    *("ministral, sliding_window 8", "mistral3, tie_word_embeddings true", "mistral3, text_config.is_causal false"),
)
_PUBLIC = ("Llama-3.2-1B", "phi-4", "Mistral-Small-3.2-24B", "Seed-OSS-36B", "Qwen2.5-7B-Instruct-1M")


def test_a_sample_of_fields_and_of_public_configurations() -> None:
    """The whole is benchmarks/results/folders.json."""
    fields = {name: config for name, config in moved() if name in _SAMPLE}
    assert fields.keys() == set(_SAMPLE)
    verdicts = judge(fields | {name: shrunk(PUBLIC[name].fields) for name in _PUBLIC})
    wrong = {name: verdicts[name] for name in _PUBLIC if not as_expected(PUBLIC[name], verdicts[name])}
    assert not wrong
    equal = {name for name in fields if verdicts[name].kind == "equal"}
    assert {verdicts[name].kind for name in fields} == {"equal", "refused"}, verdicts
    assert equal == {
        *("llama, head_dim 16", "llama, of_nobody 1", "mistral, sliding_window 40", "qwen3, use_sliding_window true"),
        *("mistral, sliding_window 39", "ministral, sliding_window 8"),
        *(
            "qwen2, max_window_layers 0",
            "phi3, num_key_value_heads 1",
            "phi3, partial_rotary_factor 0.5",
        ),
        *("seed_oss, attention_dropout 0.65", "mistral3, tie_word_embeddings true", "llama, attention_bias true"),
        *("seed_oss, attention_bias false", "seed_oss, attention_out_bias true"),
        *("arcee, mlp_bias true", "gpt_oss, swiglu_limit 11.0"),
    }


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"mlp_only_layers": [1]}, r"layers \[1\] have an MLP in place of experts .* only the first layers"),
        ({"decoder_sparse_step": 3}, "the experts cannot work: their dense_layers is 2, but the model has 2 layers"),
        ({"num_experts_per_tok": 9}, "the experts cannot work: their topk is 9; it must be at least 1 and at most"),
        ({"use_sliding_window": True}, "has use_sliding_window, but Qwen3-MoE is served without windows"),
    ],
)
def test_experts_that_are_not_served_are_a_sentence(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        describe(bases()["qwen3_moe"] | changed, "config.json")


@pytest.mark.parametrize(
    "changed, said",
    [
        (
            {"n_group": 2, "topk_group": 1},
            "groups are chosen by as many scores as each gives experts here, and by 2",
        ),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok is 1, but the score of one expert alone is not normalised"),
        ({"norm_topk_prob": False}, "has norm_topk_prob false, but scores of a row's experts are normalised here"),
        ({"first_k_dense_replace": 2}, "their dense_layers is 2, but the model has 2 layers"),
    ],
)
def test_sigmoid_experts_that_are_not_served_are_a_sentence(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        describe(bases()["glm4_moe"] | changed, "config.json")


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, but each of the 4 heads has keys and values"),
        ({"rope_interleave": False}, "has rope_interleave false, but neighbours in a head turn together here"),
        ({"attention_bias": True}, "has attention_bias, but projections of latent attention have no biases here"),
        ({"v_head_dim": 13}, "latent attention cannot work: its value_dim is 13, but a key has 12"),
        ({"topk_method": "greedy"}, "has topk_method 'greedy', but experts are chosen by score plus bias here"),
        ({"rope_parameters": _YARN | {"truncate": False}}, "has truncate false for rotary positions, which latent"),
        (
            {"rope_parameters": _YARN | {"factor": 1.0, "attention_factor": 2.0}},
            "In the scaling of rotary positions of config.json attention_factor is 2, but factor is 1, with which",
        ),
    ],
)
def test_latent_attention_that_is_not_served_is_a_sentence(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        describe(bases()["deepseek_v3"] | changed, "config.json")


def test_another_scaling_of_latent_attention_keeps_its_magnitudes() -> None:
    first = bases()["deepseek_v3"] | {
        "dtype": "float32",
        "rope_parameters": _YARN | {"mscale": 1.5, "mscale_all_dim": 0.5},
    }
    model = describe(first, "config.json")
    assert (model.head_dim, model.value_dim, model.latent.score_magnitude) == (12, 6, 0.5)
    assert config_fields(model, "float32", first) == first
    model = dataclasses.replace(model, rope_scaling=dataclasses.replace(model.rope_scaling, factor=8.0))
    assert describe(config_fields(model, "float32", first), "config.json") == model


def test_gpt_oss_without_a_word_on_experts_has_them() -> None:
    fields = {name: value for name, value in bases()["gpt_oss"].items() if name != "num_local_experts"}
    assert describe(fields, "config.json").experts.count == 128
    model = describe(fields | {"num_local_experts": 0}, "config.json")
    assert (model.sinks, model.layer_types, model.variant.attention_output_bias) == (True, ["window", "full"], True)


def test_a_class_with_a_scaling_of_its_own_is_told_of_none() -> None:
    first = bases()["gpt_oss"] | {"rope_parameters": None}
    model = describe(first, "config.json")
    assert (model.rope_scaling.kind, model.rope_scaling.factor, model.rope_base) == ("yarn", 32.0, 150000.0)
    model = dataclasses.replace(model, rope_scaling=RopeScaling(original_length=model.positions))
    for absent in (first, {name: value for name, value in first.items() if name != "rope_parameters"}):
        assert describe(config_fields(model, "float32", absent), "config.json").rope_scaling.kind == "none"


def test_the_kept_result_has_nothing_wrong_and_is_of_today() -> None:
    kept = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "folders.json").read_text())
    assert kept["wrong"] == [] and kept["public"].keys() == PUBLIC.keys()
    assert kept["fields"].keys() == {name for name, _ in moved()}


_ODD: list[Any] = [
    *(None, True, False, 0, -1, 3.5, 1e308, float("nan"), float("inf"), 10**400, "", "yarn", [], [1], {}, [{}]),
    *({"a": 1}, {"__float__": "NaN"}, {"rope_type": []}, {"rope_type": "yarn"}, {"type": {}}),
]


def test_a_changed_config_is_served_or_refused_in_a_sentence() -> None:
    """Whatever a field holds; the values are no part of what transformers writes."""
    starts, random = [*bases().values(), *(each.fields for each in PUBLIC.values())], Random(1)
    for _ in range(1500):
        config = dict(random.choice(starts))
        for _ in range(random.choice((1, 1, 2))):
            config[random.choice([*config, "rope_parameters", "layer_types", "text_config", "dtype", "head_dim"])] = (
                random.choice(_ODD)
            )
        try:
            described = describe(config, "config.json")
        except ModelError:
            continue
        json.dumps(config_fields(described, "bfloat16", config))


def test_two_scalings_are_refused_unless_they_are_one() -> None:
    base: dict[str, Any] = bases()["qwen3"]
    newer = {"rope_type": "default", "rope_theta": 1e6}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    with pytest.raises(ModelError, match=r"takes the second, with the base 10000 instead of the first one's; put"):
        describe(base | {"rope_parameters": newer, "rope_scaling": yarn}, "config.json")
    assert describe(base | {"rope_parameters": newer, "rope_scaling": newer}, "config.json").rope_base == 1e6


def test_an_export_keeps_what_training_did_not_change() -> None:
    first = bases()["mistral"] | {
        **{"sliding_window": 4096, "of_nobody": [1], "torch_dtype": "bfloat16", "rope_theta": 500.0},
        "rope_scaling": {"type": "yarn", "factor": 4.0, "attn_factor": 0.8, "original_max_position_embeddings": 16},
    }
    model = describe(first, "config.json")
    assert config_fields(model, "bfloat16", first) == first
    stretched = dataclasses.replace(model, rope_base=1e6, positions=128)
    assert config_fields(stretched, "bfloat16", first) == first | {"rope_theta": 1e6, "max_position_embeddings": 128}
    anew = dataclasses.replace(model, rope_scaling=dataclasses.replace(model.rope_scaling, factor=8.0))
    written = config_fields(anew, "float32", first)
    assert written["torch_dtype"] == "float32" and written["rope_scaling"]["factor"] == 8.0
    assert "attn_factor" not in written["rope_scaling"] and written["of_nobody"] == [1]
    assert describe(written, "config.json") == dataclasses.replace(anew, dtype="float32")


def test_a_stretched_mixtral_says_how_wide_its_heads_are() -> None:
    """Transformers cannot build one with YaRN or dynamic scaling otherwise."""
    from transformers import AutoConfig, AutoModelForCausalLM

    first = bases()["mixtral"]
    assert "head_dim" not in first
    model = describe(first, "config.json")
    yarn = dataclasses.replace(model.rope_scaling, kind="yarn", factor=4.0)
    written = config_fields(dataclasses.replace(model, rope_scaling=yarn), "float32", first)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**written))


def test_the_text_part_of_several_is_exported_in_its_place(tmp_path: Path) -> None:
    write_folder("mistral3", tmp_path)
    first = json.loads((tmp_path / "config.json").read_text())
    model = describe_folder(tmp_path)
    assert (model.family, model.head_dim, model.tie_embeddings) == ("mistral3", 16, False)
    assert config_fields(model, "float32", first) == first
    written = config_fields(dataclasses.replace(model, rope_base=1e6), "float32", first)
    assert written["text_config"]["rope_parameters"]["rope_theta"] == 1e6
    assert written | {"text_config": None} == first | {"text_config": None}


def test_a_composite_that_says_nothing_of_ties_goes_by_its_tensors(tmp_path: Path) -> None:
    write_folder("mistral3", tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    for part in (fields, fields["text_config"]):
        part.pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert not describe_folder(tmp_path).tie_embeddings
    assert not describe(fields, "config.json").tie_embeddings


_BY_KIND_OF_LAYER = {
    "full_attention": {"rope_type": "yarn", "rope_theta": 500.0, "original_max_position_embeddings": 16, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
_LONG = {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}


@pytest.mark.parametrize(
    "kind, rope",
    [
        ("phi3", {"rope_theta": 500.0, "rope_scaling": _LONG, "partial_rotary_factor": 0.75}),
        ("phi3", {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.75, **_LONG}}),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 16}}),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0}}),
        ("llama", {"rope_parameters": None}),
        ("gpt_oss", {"rope_parameters": None}),
        ("olmo3", {"rope_parameters": _BY_KIND_OF_LAYER}),
        ("olmo3", {"rope_parameters": _BY_KIND_OF_LAYER, "layer_types": ["full_attention"] * 2}),
    ],
)
@pytest.mark.parametrize("change", ["positions", "base", "scaling"])
def test_an_export_says_the_rotary_positions_that_were_trained(kind: str, rope: dict[str, Any], change: str) -> None:
    """Where positions become more, and where the base or the scaling is another one."""
    first = bases()[kind] | rope
    model = describe(first, "config.json")
    changed: dict[str, Any] = {
        "positions": {"positions": 2 * model.positions},
        "base": {"rope_base": 2 * model.rope_base},
        "scaling": {"rope_scaling": dataclasses.replace(model.rope_scaling, factor=8.0)},
    }[change]
    if change == "scaling" and model.rope_scaling.kind == "none":
        return  # a factor of nothing
    model = dataclasses.replace(model, **changed)
    again = describe(config_fields(model, "float32", first), "config.json")
    if model.rope_scaling.kind == "none":  # whose first context is all positions
        again = dataclasses.replace(again, rope_scaling=model.rope_scaling)
    assert again == dataclasses.replace(model, dtype=again.dtype)


def test_a_model_whose_heads_do_not_divide_hidden_is_written_as_transformers_takes_it() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden": 64, "heads": 3, "kv_heads": 1, "head_dim": 16, "layers": 1, "ffn": 32}
    config = parse_run_config([f"--model.{name}={size}" for name, size in sizes.items()])
    described = description_of(config, 16)
    written = config_fields(described, "float32", {})
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**written))
    found = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
    assert found == expected_shapes(described) and made.config.sliding_window is None
    assert describe(written, "config.json").windows == (0,)
