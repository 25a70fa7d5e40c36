import dataclasses
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.errors import ConfigError
from distca.train.config.cli import files_first, known_settings, parse_run_config, to_yaml
from distca.train.config.schema import ModelConfig, RunConfig

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train: {steps: 7, micro_batches: 2}\noptimizer: {lr: 3e-4}\n")
    config = parse_run_config(["--config", str(file), "--train.steps", "9", "--cad.enabled=false"])
    assert (config.train.steps, config.train.micro_batches, config.optimizer.lr) == (9, 2, 3e-4)
    assert config.cad.enabled is False
    assert config.model == RunConfig().model


def test_where_a_file_is_named_makes_no_difference(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train: {steps: 6, micro_batches: 3}")
    for arguments in (["--train.steps", "3", "--config", str(file)], ["--train.steps=3", f"--config={file}"]):
        config = parse_run_config(files_first(arguments))
        assert (config.train.steps, config.train.micro_batches) == (3, 3)
    assert files_first(["--config"]) == ["--config"]


def test_a_file_may_merge_what_it_repeats(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("log: {<<: {every: 2}, tensorboard: false}")
    assert parse_run_config(["--config", str(file)]).log.every == 2


def test_no_arguments_give_the_defaults() -> None:
    assert parse_run_config([]) == RunConfig()


@settings(deadline=None, max_examples=40)
@given(
    steps=st.integers(1, 10**6),
    lr=st.floats(1e-8, 1.0),
    path=st.none() | st.from_regex(r"[\w./~-]*[\w]", fullmatch=True).filter(lambda path: path.lower() != "null"),
    timeline=st.none() | st.tuples(st.integers(1, 99), st.integers(1, 99)),
)
def test_yaml_is_read_back_as_an_equal_configuration(tmp_path_factory, steps, lr, path, timeline) -> None:
    config = RunConfig()
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, steps=steps),
        optimizer=dataclasses.replace(config.optimizer, lr=lr),
        data=dataclasses.replace(config.data, path=path),
        log=dataclasses.replace(config.log, timeline_steps=timeline),
    )
    file = tmp_path_factory.mktemp("yaml") / "config.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    assert parse_run_config(["--config", str(file)]) == config


def test_a_name_that_looks_like_a_number_is_read_back(tmp_path: Path) -> None:
    config = parse_run_config(["--name", "3e-4", "--data.path", "12e4", "--optimizer.lr", "3e-4"])
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert parse_run_config(["--config", str(tmp_path / "config.yaml")]) == config


@pytest.mark.parametrize("text", ["*x", "!x", "!", "[x", "{a: b}", "~x", "&x y", "true", "1", "- x", " ", "'x'"])
def test_a_text_is_read_as_it_is(text: str) -> None:
    config = parse_run_config([f"--data.path={text}", f"--name={text}", "--data.tokenizer", "&x"])
    assert (config.data.path, config.name, config.data.tokenizer) == (text, text, "&x")
    assert parse_run_config(["--data.path", "NULL"]).data.path is None


@pytest.mark.parametrize("file", CONFIGS, ids=lambda path: path.name)
def test_shipped_configurations_are_read(file: Path) -> None:
    config = parse_run_config(["--config", str(file)])
    written = yaml.safe_load(file.read_text())
    assert config.name == written["name"] and config.data.source == written["data"].get("source", "stdlib")
    assert config.model.layers == written.get("model", {"layers": ModelConfig().layers})["layers"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--train.stepz", "3"], "There is no setting 'train.stepz' (on the command line). Did you mean train.steps?"),
        (["--steps", "3"], "Did you mean train.steps?"),
        (["--optimizer.learning_rate", "1e-3"], "Did you mean optimizer.lr?"),
        (["--train.steps", "many"], "train.steps must be a whole number, not many."),
        (["--train.steps", "1.5"], "train.steps must be a whole number, not 1.5."),
        (["--optimizer.lr", "fast"], "optimizer.lr must be a number, not fast."),
        (["--cad.enabled", "1"], "cad.enabled must be true or false, not 1."),
        (
            ["--train.recompute", "true"],
            "must be one of auto, none, mlp, all, not true: write mlp, or all where memory is",
        ),
        (["--train.recompute", "False"], "train.recompute must be one of auto, none, mlp, all, not False: write none."),
        (["--cad.backward", "send"], "cad.backward must be one of auto, keep, resend, not send."),
        (["--log.timeline_steps", "[3]"], "log.timeline_steps must be a list of 2 whole numbers or null, not [3]."),
        (["--train.steps"], "--train.steps needs a value: a whole number."),
        (["--cad.tolerance", "true"], "cad.tolerance must be a number or null, not true."),
        (["--cad.tolerance", ""], "--cad.tolerance needs a value: a number or null."),
        (["--train", "3"], "train is a group of settings; give them one by one, such as --train.steps VALUE."),
        (["--model.rope_scaling", "{}"], "such as --model.rope_scaling.kind VALUE."),
        (["--data.begin_token", "#"], "data.begin_token is '#', which YAML reads as a comment, so as null; choose"),
        (["--data.path= # old"], "data.path is ' # old', which YAML reads as a comment"),
        (
            ["--data.path", "&x"],
            "data.path is '&x', which YAML reads as null; choose a text that does not begin with '&',",
        ),
        (
            ["--data.path= ~"],
            "data.path is ' ~', which YAML reads as null; choose a text that does not begin with '~',",
        ),
        (["--data.end_token=---"], "data.end_token is '---', which YAML reads as null; choose"),
        (["--data.end_token=!!null x"], "data.end_token is '!!null x', which YAML reads as null"),
        (["--cad.tolerance", "&x"], "cad.tolerance is '&x', which YAML reads as null"),
        (["20"], "'20' on the command line belongs to no setting"),
        (["--config", "nowhere.yaml"], "which is not a file. There are: configs/from-folder-tiny.yaml, "),
        (["--config", "configs/nowhere.yaml"], "There are: configs/from-folder-tiny.yaml, "),
        (["--config", "/proc/self/mem"], "/proc/self/mem cannot be read (Input/output error); name a file that can."),
        (["--checkpoint.resume", ""], "checkpoint.resume is empty; give it a value, or leave it out."),
        (["--checkpoint.init_from="], "checkpoint.init_from is empty"),
        (["--output", ""], "output is empty"),
        (["--name", "new", "--checkpoint.resume", "runs/old"], "name is new, but checkpoint.resume is runs/old, and"),
        (["--config"], "--config needs the path of a YAML file"),
    ],
)
def test_mistakes_on_the_command_line_are_sentences(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run_config(arguments)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: {hiden: 3}", "There is no setting 'model.hiden'"),
        ("modell: {hidden: 3}", "There is no setting 'modell.hidden'"),
        ("data: {begin_token: '#'}", "data.begin_token is '#', which YAML reads as a comment, so as null; choose"),
        ("data: {path: '&x'}", "data.path is '&x', which YAML reads as null; choose a text"),
        ("model: 3", "model in"),
        ("model: 3", "run.yaml has no settings below it; write some, or leave it out."),
        ("- a", "must hold settings as 'name: value' lines, not a list"),
        ("a: [", "is not valid YAML"),
        (
            "train: {recompute: true}",
            "train.recompute must be one of auto, none, mlp, all, not True: write mlp, or all",
        ),
        ("train: {recompute: no}", "train.recompute must be one of auto, none, mlp, all, not False: write none."),
        ("model: {hidden: wide}", "model.hidden must be a whole number, not wide."),
        (
            "train: {steps: 3}\nmodel: {layers: 2}\ntrain: {micro_batches: 2}",
            "train is there twice, again in line 3; put both",
        ),
        ("train:\n  steps: 3\n  steps: 4", "steps is there twice, again in line 3;"),
        ("name: 2026-02-30", "run.yaml is not valid YAML: day is out of range for month."),
        ("", "run.yaml holds no settings; write some, or leave out --config."),
        ("name: " + "[" * 3000, "run.yaml is YAML nested too deep to be read."),
        ("train:\nmodel: {layers: 2}", "run.yaml has no settings below it; write some, or leave it out."),
    ],
)
def test_mistakes_in_a_file_are_sentences(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse_run_config(["--config", str(file)])
    assert said in str(caught.value)


def test_help_explains_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_run_config(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert [name for name in known_settings() if f"--{name}" not in shown] == []
    assert "learning rate of the first step after the warm-up" in " ".join(shown.split())


def test_every_setting_has_a_description() -> None:
    for group in (RunConfig, *(type(getattr(RunConfig(), field.name)) for field in dataclasses.fields(RunConfig))):
        if dataclasses.is_dataclass(group):
            said = "".join(each.__doc__ or "" for each in group.__mro__ if dataclasses.is_dataclass(each))
            undescribed = [f.name for f in dataclasses.fields(group) if f"        {f.name}: " not in said]
            assert undescribed == [], group.__name__


@pytest.mark.parametrize("resume", ["latest", "runs/mine", "runs/mine/"])
def test_a_name_may_say_which_run_is_resumed(resume: str) -> None:
    assert parse_run_config(["--name=mine", "--checkpoint.resume", resume]).name == "mine"
