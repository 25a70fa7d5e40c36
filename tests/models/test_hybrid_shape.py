"""Shapes of hybrid stacks: their weights, and what folders say of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import family_models
from benchmarks.folder_fields import bases
from distca.errors import ModelError
from distca.models.description import describe, describe_folder
from distca.models.hybrid import Hybrid, shortest
from distca.models.tensors import TensorFiles, _named_as
from distca.simulate import MODELS

FOLDERS = bases()


def test_mlp_weights_of_a_hybrid_are_those_of_its_mlps() -> None:
    hybrid = Hybrid(pattern="G-G-G-*-", key_heads=16, value_heads=32)
    shape = replace(MODELS["8b"], layers=8, hybrid=hybrid)
    assert (shape.units, shape.recurrent_layers) == (4, "GGG")
    assert shape.mlp_weights == 3 * shape.hidden * shape.ffn
    assert shape.layer_weights == shape.matmul_weights // 4


def test_pattern_is_no_longer_than_what_repeats() -> None:
    assert [shortest(symbols) for symbols in ("G-G-*-" * 2, "M-M*-", "****", "")] == ["G-G-*-", "M-M*-", "*", ""]


def test_layer_of_a_folder_has_a_mixer_and_its_mlp_or_one_of_them() -> None:
    qwen, nemotron = (describe(FOLDERS[kind], "config.json") for kind in ("qwen3_5_text", "nemotron_h"))
    assert (qwen.layers, list(qwen.stored_numbers)) == (4, [0, 0, 1, 1])
    assert (nemotron.layers, list(nemotron.stored_numbers)) == (3, [0, 1, 2])
    assert [kind.recurrent for kind in qwen.layer_kinds] == ["G", ""]
    mixture = describe(FOLDERS["qwen3_next"], "config.json")
    assert mixture.hybrid.pattern == "GE*E" and [kind.mlp.experts.count for kind in mixture.layer_kinds] == [4, 4]


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("qwen3_5_text", {"layer_types": ["sliding_attention"] * 2}, "layer_types has sliding_attention, but only"),
        ("qwen3_5_text", {"layer_types": ["full_attention"]}, "layer_types has 1 layers, but num_hidden_layers is 2"),
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 2}, "their pattern is 'G-G-', without attention"),
        ("qwen3_5_text", {"linear_num_value_heads": 3}, "their value_heads is 3, no multiple of key_heads 2"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim 3, but convolutions read 4 rows here"),
        ("nemotron_h", {"layers_block_type": ["mamba", "moe"]}, "layers_block_type has moe, but only"),
        ("nemotron_h", {"layers_block_type": ["mlp", "attention"]}, "each MLP or layer with experts follows a mixer"),
        ("nemotron_h", {"layers_block_type": None}, "there is no layers_block_type"),
        (
            "nemotron_h",
            {"layers_block_type": None, "hybrid_override_pattern": "M+*"},
            "hybrid_override_pattern has '+'",
        ),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("nemotron_h", {"mlp_bias": True}, "mlp_bias, but projections of Nemotron-H have no biases here"),
    ],
)
def test_hybrids_that_are_not_served_are_refused(kind: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as refused:
        describe(FOLDERS[kind] | fields, "config.json")
    assert said in str(refused.value)


def test_missing_tensor_or_an_output_layer_that_nothing_ties_is_a_sentence(tmp_path: Path) -> None:
    family_models.write_folder("qwen3_5 with images, tied", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    described, files = describe_folder(tmp_path), TensorFiles(tmp_path, "numpy")
    files.check(described)
    carried = files.of_other_parts(described)
    assert "mtp.fc.weight" in carried and any(name.startswith("model.visual.") for name in carried)
    del config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"text_config": config["text_config"] | {"tie_word_embeddings": False}})
    )
    with pytest.raises(ModelError, match=r"has no tensor lm_head\.weight"):
        files.check(describe_folder(tmp_path))
    del files._file_of[files.stored["model.layers.1.linear_attn.A_log"]]
    with pytest.raises(ModelError, match=r"has no tensor model\.language_model\.layers\.1\.linear_attn\.A_log"):
        files.check(described)


def test_body_of_another_name_is_nemotrons_alone() -> None:
    for kind, taken in (("nemotron_h", True), ("llama", False)):
        model = describe(FOLDERS[kind], "config.json")
        assert _named_as(model, "model.layers.0.norm.weight", "backbone.layers.0.norm.weight") == taken
