"""What a model's folder asks of a run's settings: a context that it knows, within its windows, and data to learn."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from distca.errors import ConfigError, ModelError
from distca.train.checkpoint.export import tokenizer_warning
from distca.train.config.cli import check_data_named, parse_run_config
from distca.train.config.initial import context_warning, description_of
from distca.train.config.validate import validate
from distca.train.run.main import main

_SIZES = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 256),
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
}


def _folder(tmp_path: Path, model_type: str = "llama", **fields: Any) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_SIZES | {"model_type": model_type} | fields))
    return folder


def _line(folder: Path, *more: str) -> list[str]:
    return [
        "--checkpoint.init_from",
        str(folder),
        "--output",
        str(folder.parent),
        "--data.tokens_per_rank",
        "65536",
        *more,
    ]


def _context(length: int) -> list[str]:
    return ["--data.context_length", str(length)]


@pytest.mark.parametrize(("model_type", "fields"), [("mistral", {}), ("qwen2", {"use_sliding_window": True})])
def test_windows_come_along_with_a_folder(tmp_path: Path, model_type: str, fields: dict[str, Any]) -> None:
    folder = _folder(tmp_path, model_type, sliding_window=1000, **fields | {"max_window_layers": 1})
    model = parse_run_config(_line(folder, *_context(1500))).model
    assert model.windows == ((1000,) if model_type == "mistral" else (0,)) * 1 + (1000,) * (model.layers - 1)
    with pytest.raises(ConfigError, match=r"model\.window is 7, but the model in checkpoint\.init_from"):
        validate(parse_run_config(_line(folder, "--model.window", "7")), 4)


def test_sinks_are_refused_for_a_folder_without_them(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.sinks is True, but the model in checkpoint\.init_from .* has False"):
        parse_run_config(_line(folder, *_context(1500), "--model.sinks", "true"))


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    ("scaling", "longest", "more"),
    [
        (None, 4096, []),
        (None, 8192, ["--model.rope_scaling.kind", "linear", "--model.rope_scaling.factor", "2"]),
        (None, 16384, ["--model.rope_scaling.kind", "yarn", "--model.rope_scaling.factor", "4"]),
        (None, 65536, ["--model.rope_base", "1e6"]),
        (None, 65536, ["--model.rope_scaling.kind", "dynamic", "--model.rope_scaling.factor", "2"]),
        (_YARN, 8192, []),
        (_YARN, 16384, ["--model.rope_scaling.factor", "8"]),
        ({"rope_type": "linear", "factor": 4.0}, 4096, []),
    ],
)
def test_positions_that_the_model_never_saw_are_warned_of(
    tmp_path: Path, scaling: dict[str, Any] | None, longest: int, more: list[str]
) -> None:
    folder = _folder(tmp_path, rope_scaling=scaling)
    assert context_warning(parse_run_config(_line(folder, *_context(longest), *more))) is None
    said = context_warning(parse_run_config(_line(folder, *_context(longest + 1), *more)))
    if longest == 65536:
        assert said is None
        return
    assert said is not None and said.startswith(f"data.context_length is {longest + 1}, but the model in ")
    assert f"knows {longest} positions" in said and "Set model.rope_base to a larger base" in said


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 2.0,
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 2048},
}


@pytest.mark.parametrize("scaling", [None, _YARN | {"factor": 2.0}, _LLAMA3, {"rope_type": "linear", "factor": 4.0}])
def test_the_factor_that_is_advised_is_the_smallest_that_helps(tmp_path: Path, scaling: dict[str, Any] | None) -> None:
    line = _line(_folder(tmp_path, rope_scaling=scaling), *_context(16000))
    said = context_warning(parse_run_config(line))
    assert said is not None
    advised = int(said.partition("model.rope_scaling.factor to ")[2].partition(" ")[0])
    line += ["--model.rope_scaling.kind", "yarn", "--model.rope_scaling.factor"]
    assert context_warning(parse_run_config([*line, str(advised)])) is None
    assert context_warning(parse_run_config([*line, str(advised - 1)])) is not None


def test_a_run_without_a_folder_has_no_context_to_warn_of() -> None:
    assert context_warning(parse_run_config([])) is None


def test_a_folder_is_not_trained_on_data_that_nobody_named(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    line = _line(folder)
    with pytest.raises(ConfigError, match="nothing says what to train it on; set DATA_SOURCE and DATA_PATH"):
        check_data_named(line, parse_run_config(line))
    for on_purpose in (["--data.source", "stdlib"], ["--data.source=mix", "--data.path", "pretrain"]):
        check_data_named(line + on_purpose, parse_run_config(line + on_purpose))
    (tmp_path / "mine.yaml").write_text("data: {source: stdlib}\n")
    for file in (["--config", str(tmp_path / "mine.yaml")], [f"--config={tmp_path / 'mine.yaml'}"]):
        check_data_named(file + line, parse_run_config(file + line))
    check_data_named([], parse_run_config([]))


def test_the_configurations_for_folders_name_no_data(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("from-folder", "from-folder-tiny"):
        file = Path(__file__).parents[3] / "configs" / f"{name}.yaml"
        line = ["--check", "4", "--config", str(file), *_line(_folder(tmp_path))]
        with pytest.raises(SystemExit) as ended:
            main(line)
        assert ended.value.code == 2 and "nothing says what to train it on" in " ".join(capfd.readouterr().err.split())


def test_a_folders_own_tokenizer_is_not_the_remedy_for_itself(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    with pytest.raises(ConfigError, match=r"is the model's own, but its embedding has no rows for all of them: take"):
        validate(parse_run_config(_line(folder)), 4, vocabulary=300)
    other = _line(folder, "--data.tokenizer", str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"so use the tokenizer of that folder\."):
        validate(parse_run_config(other), 4, vocabulary=300)


def test_a_scaling_that_transformers_has_not_is_not_exported(tmp_path: Path) -> None:
    yarn = ["--model.rope_scaling.kind", "yarn", "--model.rope_scaling.factor", "4"]
    folder = _folder(tmp_path, "phi3")
    with pytest.raises(ModelError, match=r"model\.rope_scaling\.kind is yarn, which models of phi3 do not have"):
        description_of(parse_run_config(_line(folder, *yarn)), 256)
    assert description_of(parse_run_config(_line(folder)), 256).family == "phi3"
    longrope = [f"--model.rope_scaling.{name}={value}" for name, value in (("kind", "longrope"), ("factor", "2"))]
    with pytest.raises(ModelError, match=r"model\.rope_scaling\.kind is longrope, which models of llama do not have"):
        description_of(parse_run_config(longrope), 256)


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_two_first_contexts_are_not_exported_as_one(tmp_path: Path, kind: str) -> None:
    """The scaling of queries and that of positions have one number in transformers."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}
    rope |= {"original_max_position_embeddings": 2048}
    folder = _folder(tmp_path, "ministral3", head_dim=64, rope_parameters=rope)
    scaled = _line(folder, "--model.rope_scaling.kind", kind, "--model.rope_scaling.factor", "4")
    for length in ("2048", "4096"):
        config = parse_run_config([*scaled, "--model.rope_scaling.original_length", length])
        if length == "2048":
            assert description_of(config, 256).rope_scaling.kind == kind
            continue
        with pytest.raises(ModelError, match=r"original_length is 4096, but queries are scaled from 2048 positions"):
            description_of(config, 256)


def test_what_is_left_out_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from distca.models.description import describe_folder

    folder = _folder(tmp_path, "seed_oss", of_nobody=1, auto_map={"AutoModel": "code.Model"})
    with caplog.at_level(logging.WARNING):
        warnings = describe_folder(folder).warnings
    assert not caplog.records and [warning.split(" has ")[1].split(",")[0] for warning in warnings] == [
        "auto_map",
        "no attention_dropout",
        "no residual_dropout",
        "of_nobody",
    ]


def test_an_export_without_the_runs_own_tokenizer_is_warned_of(tmp_path: Path) -> None:
    folder, other = _folder(tmp_path), tmp_path / "instruct"
    other.mkdir()
    for each in (folder, other):
        (each / "tokenizer.json").write_text("{}")
    for own in (folder, other, "bytes"):
        assert tokenizer_warning(parse_run_config(_line(folder, "--data.tokenizer", str(own))), folder) is None
    (other / "chat_template.jinja").write_text("{{ messages }}")
    for own in (other, other / "tokenizer.json"):
        said = tokenizer_warning(parse_run_config(_line(folder, "--data.tokenizer", str(own))), folder)
        assert said is not None and f"data.tokenizer is {own}, whose files differ" in said
