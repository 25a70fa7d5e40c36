from dataclasses import replace
from pathlib import Path

import pytest

from distca.commands.simulate_inputs import read_model
from distca.errors import OptionError
from distca.simulate import MODELS, dense
from distca.train.config.cli import parse_run_config, to_yaml


def test_models_are_names_or_configurations(tmp_path: Path) -> None:
    configurations = Path(__file__).parents[2] / "configs"
    for name, file in (("8b", "llama-8b"), ("34b", "llama-34b"), ("gemma-3-like",) * 2, ("gpt-oss-like",) * 2):
        assert read_model(str(configurations / f"{file}.yaml")) == MODELS[name]
    normed = read_model(str(configurations / "qwen3-30b-a3b.yaml"))
    assert normed.qk_norm and replace(normed, experts=MODELS["qwen3-30b-a3b"].experts) == MODELS["qwen3-30b-a3b"]
    (tmp_path / "tied.yaml").write_text(
        "model: {layers: 2, hidden: 64, ffn: 64, heads: 2, kv_heads: 1, tie_embeddings: true}"
    )
    assert read_model(str(tmp_path / "tied.yaml")) == dense(2, 64, 64, 2, 1, 32, tie_embeddings=True)
    own = parse_run_config(["--model.experts.count", "4", "--model.experts.ffn", "8"])  # with all groups written out
    (tmp_path / "config.yaml").write_text(to_yaml(own))
    found, wanted = read_model(str(tmp_path / "config.yaml")), own.model
    assert (found.layers, found.heads, found.kv_heads) == (wanted.layers, wanted.heads, wanted.kv_heads)
    assert found.experts == wanted.experts and found.latent == wanted.latent
    cut = read_model(str(configurations / "qwen3.5-9b-like-cut.yaml"))
    assert cut == replace(MODELS["qwen3.5-9b"], layers=8, vocabulary=32_000, variant=cut.variant)
    assert cut.variant.zero_centered_norms
    plain = dense(2, 64, 64, 2, 1, 32)
    (tmp_path / "plain.yaml").write_text(
        "model: {layers: 2, hidden: 64, ffn: 64, heads: 2, kv_heads: 1, variant: {gated: false}}"
    )
    assert plain.held_weights - read_model(str(tmp_path / "plain.yaml")).held_weights == 2 * 64 * 64
    (tmp_path / "power.yaml").write_text(
        "model: {layers: 2, hidden: 64, ffn: 64, heads: 2, kv_heads: 1, variant: {window_rope_base: 1e6}}"
    )
    assert read_model(str(tmp_path / "power.yaml")).variant.window_rope_base == 1e6
    sizes = "layers: {}, hidden: 64, ffn: 64, heads: {}, kv_heads: 1"
    for content, said in (
        ("name: x", "has no model"),
        ("model: 3", "has no model"),
        ("[" * 20_000, "none.yaml is YAML nested too deep"),
        (f"model: {{{sizes.format(2, 0)}}}", "has heads 0; it must be a whole number from 1"),
        (f"model: {{{sizes.format('.inf', 2)}}}", "has layers inf; it must be a whole number"),
        (f"model: {{{sizes.format(2.7, 2)}}}", "has layers 2.7; it must be a whole number"),
        (f"model: {{{sizes.format('true', 2)}}}", "has layers True; it must be a whole number"),
        (f"model: {{{sizes.format(2, 2)}, vocabulary: -5}}", "has vocabulary -5; it must be"),
        (f"model: {{{sizes.format(2, 2)}, tie_embeddings: 1}}", "has tie_embeddings 1; it must be true or false"),
        (f"model: {{{sizes.format(2, 2)}, sinks: 1}}", "has sinks 1; it must be true or false"),
        (f"model: {{{sizes.format(2, 2)}, layer_types: [full, chunk]}}", "it must be a list of full and window"),
        (f"model: {{{sizes.format(2, 2)}, layer_types: [window]}}", "has window 0 with layer_types"),
        (f"model: {{{sizes.format(2, 2)}, window: 3}}", "has window 3 with layer_types"),
        (f"model: {{{sizes.format(2, 2)}, latent: {{rank: 3}}}}", "has latent with 'rank'; known are kv_rank"),
        (f"model: {{{sizes.format(2, 2)}, latent: {{kv_rank: 1.5}}}}", "has latent with kv_rank 1.5"),
        (f"model: {{{sizes.format(2, 2)}, latent: {{kv_rank: 8}}}}", "every head has keys; set it to 2"),
        *(
            (
                f"model: {{layers: 2, hidden: 64, ffn: 64, heads: 2, kv_heads: 2, latent: {{kv_rank: 8}}, {more}}}",
                f"cannot be trained: its {said}, which is not served with latent attention; set it to",
            )
            for more, said in (
                ("sinks: true", "sinks is true"),
                ("layer_types: [full, window], window: 9", r"layer_types is \['full', 'window'\]"),
                ("qk_norm: true", "qk_norm is true"),
            )
        ),
        (
            f"model: {{{sizes.format(2, 2)}, hybrid: {{pattern: GG}}}}",
            "a hybrid stack that cannot be: .* without attention",
        ),
        *(
            (f"model: {{{sizes.format(2, 2)}, hybrid: {{pattern: {pattern}}}{more}}}", said)
            for pattern, more, said in (
                ("'*E'", "", r"experts with count 0 and a hybrid pattern '\*E'; give experts where it has E"),
                ("'*-'", ", experts: {count: 4, ffn: 8}", "experts with count 4 and a hybrid pattern"),
                ("'*-'", ", layer_types: [window], window: 9", "window 9, which is not served with a hybrid pattern"),
            )
        ),
        (
            f"model: {{{sizes.format(2, 2)}, hybrid: {{heads: 1}}}}",
            "has hybrid with 'heads'; known are pattern",
        ),
        (f"model: {{{sizes.format(2, 2)}, hybrid: {{rotate: 1}}}}", "with rotate 1; it must be such as True"),
        (f"model: {{{sizes.format(2, 2)}, variant: {{gate: 1}}}}", "has variant with 'gate'; known are activation"),
        (f"model: {{{sizes.format(2, 2)}, variant: {{unrotated_layers: [x]}}}}", "has variant with unrotated_layers"),
        (f"model: {{{sizes.format(2, 2)}, variant: {{rotary_percent: 0.0}}}}", "cannot be: its rotary_percent is 0"),
        (f"model: {{{sizes.format(2, 3)}}}", "has hidden 64, which is not divisible by heads 3; change one or give"),
    ):
        (tmp_path / "none.yaml").write_text(content)
        with pytest.raises(OptionError, match=said):
            read_model(str(tmp_path / "none.yaml"))
