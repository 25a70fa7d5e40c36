"""Reading a run's settings: one YAML file (``--config``) and dotted overrides, which win over the file.

    python pretrain_llama.py --config configs/tiny.yaml --train.steps 20 --cad.enabled false

A setting that is not given keeps its default from ``distca.train.config.schema``; one that does not exist is an error.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import jsonargparse

from distca.errors import ConfigError, system_words
from distca.train.config.initial import check_same_shape, settings_of_folder
from distca.train.config.schema import RESUME_BY_NAME, RunConfig
from distca.words import takes, value_refused
from distca.yaml_file import is_null_by_chance, read_yaml, written_yaml

# (setting, value that one may well try) and what to write for it.
_INSTEAD = {
    ("train.recompute", "true"): "write mlp, or all where memory is short",
    ("train.recompute", "false"): "write none",
}
_NEVER_EMPTY = ("output", "checkpoint.resume", "checkpoint.init_from", "checkpoint.export", "log.wandb")
"""An empty text would pass for none here, where perhaps a variable of a user's script is not set."""
_MEANT = {
    "learning_rate": "lr",
    "max_grad_norm": "clip_grad",
    "max_steps": "steps",
    "num_layers": "layers",
    "hidden_size": "hidden",
    "gradient_accumulation_steps": "micro_batches",
    "seq_length": "context_length",
}
"""The last part of a setting by the name that transformers or Megatron-Core has for it."""


def parse_run_config(argv: list[str] | None = None) -> RunConfig:
    """The run that a command line asks for; ``None`` reads ``sys.argv``. ``--help`` prints every setting and exits.
    What comes later wins, be it a file or a setting: see :func:`files_first`.

    Raises:
        ConfigError: on an unknown setting, a value of the wrong type, an empty name of a folder, or a YAML file that
            cannot be read; also on a name or shape that contradicts a named folder.
        ModelError: on a folder in checkpoint.init_from that holds no model that is served.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    _check_arguments(arguments)
    given = _given(arguments)
    config: RunConfig = _build(RunConfig, given)
    _check_not_empty(config)
    _check_name(arguments, config)
    if (brought := settings_of_folder(config)) is not None:
        config = _build(RunConfig, _nested(brought | flat(given)))
        check_same_shape(config, brought)
    return config


def check_data_named(argv: list[str], config: RunConfig) -> None:
    """Refuse a run that begins with a model's folder where nobody said what it is to be trained on.

    Args:
        argv: the command line that the run was parsed from.
        config: the run.

    Raises:
        ConfigError: data.source is neither on the command line nor in a file that it names.
    """
    if config.checkpoint.init_from is None or _is_given("data.source", argv):
        return
    raise ConfigError(
        f"checkpoint.init_from is {config.checkpoint.init_from}, but nothing says what to train it on; set DATA_SOURCE "
        "and DATA_PATH (data.source and data.path). To try it out on purpose, set DATA_SOURCE=mix DATA_PATH=pretrain "
        "for random tokens, or DATA_SOURCE=stdlib for Python's standard library."
    )


def _is_given(setting: str, argv: list[str]) -> bool:
    """Whether a setting stands on a command line, or in a file that it names."""
    return f"--{setting}" in _names(argv) or any(setting in each for each in _files(argv))


def value_in_files(setting: str, argv: list[str]) -> Any:
    """The value of a setting in the last file that a command line names and that has it; None where none has it."""
    return next((each[setting] for each in reversed(_files(argv)) if setting in each), None)


def _names(argv: list[str]) -> list[str]:
    return [argument.partition("=")[0] for argument in argv]


def _files(argv: list[str]) -> list[dict[str, Any]]:
    """The settings in each file that a command line names."""
    paths = [
        argument.partition("=")[2] or after
        for argument, name, after in zip(argv, _names(argv), [*argv[1:], ""], strict=True)
        if name == "--config"
    ]
    return [flat(read_yaml(Path(path), ConfigError) or {}) for path in paths]


@cache
def _parser() -> jsonargparse.ArgumentParser:
    """The parser, which is made once, as reading all signatures takes longer than reading a command line."""
    parser = jsonargparse.ArgumentParser(
        prog="pretrain_llama.py",
        description="Train a LLaMA-style model with core attention disaggregation. "
        "pretrain_llama.sh starts this on every rank, with a configuration that fits the machine.",
        exit_on_error=False,
        default_env=False,
    )
    parser.add_argument("--config", action="config", help="YAML file of settings, such as configs/tiny.yaml.")
    parser.add_class_arguments(RunConfig)
    return parser


def _given(arguments: list[str]) -> dict[str, Any]:
    """The settings on a command line and in the files that it names, nested as in YAML; all where they are printed."""
    printed = any(argument.startswith("--print_config") for argument in arguments)
    try:
        # Going through every default as well takes ten times as long, and the dataclasses have them.
        given: dict[str, Any] = _parser().parse_args(arguments, defaults=printed).as_dict()
    except (jsonargparse.ArgumentError, TypeError, ValueError) as error:
        raise ConfigError(_value_error(str(error))) from None
    return given


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their dotted names, nested as in YAML."""
    tree: dict[str, Any] = {}
    for setting, value in values.items():
        *groups, name = setting.split(".")
        group = tree
        for each in groups:
            group = group.setdefault(each, {})
        group[name] = value
    return tree


def to_yaml(config: RunConfig) -> str:
    """The whole configuration as YAML that ``--config`` reads back to an equal one."""
    return written_yaml(_plain(asdict(config)))


def by_setting(config: RunConfig) -> dict[str, Any]:
    """Every setting's value, as YAML has it, by its dotted name."""
    return flat(_plain(asdict(config)))


def value_of(config: RunConfig, setting: str) -> object:
    """The value of a setting by its dotted name."""
    value: object = config
    for part in setting.split("."):
        value = getattr(value, part)
    return value


def changed(config: RunConfig, values: Iterable[tuple[str, object]]) -> RunConfig:
    """The same with other values for settings such as ``train.steps``, given by their dotted names."""
    for setting, value in values:
        group, name = setting.split(".")
        config = replace(config, **{group: replace(getattr(config, group), **{name: value})})
    return config


def flat(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names."""
    values: dict[str, Any] = {}
    for name, value in tree.items():
        values |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return values


def known_settings() -> list[str]:
    """Every setting by its dotted name, such as ``train.steps``."""
    return _leaves(RunConfig, "")


def _leaves(kind: Any, prefix: str) -> list[str]:
    names: list[str] = []
    for name, hint in get_type_hints(kind).items():
        names += _leaves(hint, f"{prefix}{name}.") if is_dataclass(hint) else [prefix + name]
    return names


def _build(kind: type, values: Mapping[str, Any]) -> Any:
    """Turn nested mappings into the dataclass ``kind``; what already is a dataclass stays."""
    hints = get_type_hints(kind)
    arguments = {
        item.name: _build(hints[item.name], values[item.name])
        if is_dataclass(hints[item.name]) and isinstance(values[item.name], Mapping)
        else values[item.name]
        for item in fields(kind)
        if item.name in values
    }
    return kind(**arguments)


def _plain(value: Any) -> Any:
    """YAML has lists, but no tuples."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, tuple | list) else value


def files_first(arguments: list[str]) -> list[str]:
    """The same with every ``--config FILE`` ahead, so that settings win over files wherever these are named. Launchers
    put settings from the environment before a user's own arguments, of which one may be a file."""
    files: list[str] = []
    others: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--config":
            files += [argument, *(value for value in [next(rest, None)] if value is not None)]
        else:
            (files if argument.startswith("--config=") else others).append(argument)
    return files + others


def _check_arguments(arguments: list[str]) -> None:
    """Refuse unknown settings, on the command line and in the YAML files it names, before values are parsed."""
    known = known_settings()
    groups = {name.rsplit(".", 1)[0] for name in known if "." in name}
    expects_value = False
    for position, argument in enumerate(arguments):
        if argument in ("-h", "--help"):
            return
        if argument.startswith("--"):
            name, _, value = argument[2:].partition("=")
            if name == "config":
                _check_file(value or (arguments[position + 1] if position + 1 < len(arguments) else ""), known)
            elif name in groups:
                first = next(setting for setting in known if setting.startswith(f"{name}."))
                raise ConfigError(f"{name} is a group of settings; give them one by one, such as --{first} VALUE.")
            elif name not in known and name != "print_config":
                raise ConfigError(_unknown(name, known, "on the command line"))
            expects_value = "=" not in argument
            _check_not_null(name, value)
        elif expects_value:
            expects_value = False
            _check_not_null(arguments[position - 1][2:], argument)
        else:
            raise ConfigError(f"{argument!r} on the command line belongs to no setting; write --setting value.")


def _check_not_null(setting: str, value: object) -> None:
    """Refuse a text that jsonargparse would read as null without a word: it reads texts as YAML."""
    if isinstance(value, str) and is_null_by_chance(value) and NoneType in get_args(_hint(setting)):
        first = value.strip()[0]
        raise ConfigError(
            f"{setting} is {value!r}, which YAML reads as {'a comment, so as ' if first == '#' else ''}null; choose a "
            f"text that does not begin with {first!r}, or write null."
        )


def _check_not_empty(config: RunConfig) -> None:
    for setting in _NEVER_EMPTY:
        if value_of(config, setting) == "":
            raise ConfigError(f"{setting} is empty; give it a value, or leave it out.")


def _check_name(arguments: list[str], config: RunConfig) -> None:
    """Refuse a name beside a run's folder to resume, which has its own; a name from a file says only what it was."""
    resume, given = config.checkpoint.resume, any(re.fullmatch("--name(=.*)?", argument) for argument in arguments)
    if not given or resume in (None, *RESUME_BY_NAME):
        return
    if not re.fullmatch(re.escape(config.name) + r"(-\d+)?", Path(str(resume)).name):
        raise ConfigError(
            f"name is {config.name}, but checkpoint.resume is {resume}, and a resumed run goes on in its own folder; "
            "leave out name, or copy that folder and resume the copy."
        )


def _check_file(name: str, known: list[str]) -> None:
    if not name:
        raise ConfigError("--config needs the path of a YAML file, such as configs/tiny.yaml.")
    path = Path(name)
    if not path.is_file():
        beside = _configurations(path.parent) or _configurations(Path("configs"))
        there = f" There are: {', '.join(beside)}." if beside else ""
        raise ConfigError(f"--config names {name}, which is not a file.{there}")
    try:
        content = read_yaml(path, ConfigError)
    except OSError as error:
        raise ConfigError(f"{name} cannot be read ({system_words(error)}); name a file that can.") from None
    if content is None:
        raise ConfigError(f"{name} holds no settings; write some, or leave out --config.")
    if not isinstance(content, dict):
        raise ConfigError(f"{name} must hold settings as 'name: value' lines, not a {type(content).__name__}.")
    groups = {setting.rsplit(".", 1)[0] for setting in known if "." in setting}
    for setting, value in flat(content).items():
        if setting in groups:  # a group whose value is no mapping
            raise ConfigError(f"{setting} in {name} has no settings below it; write some, or leave it out.")
        if setting not in known:
            raise ConfigError(_unknown(setting, known, f"in {name}"))
        _check_not_null(setting, value)


def _configurations(folder: Path) -> list[str]:
    return sorted(str(file) for file in folder.glob("*.yaml") if not file.name.startswith("."))


def _unknown(name: str, known: list[str], where: str) -> str:
    last_part = name.rsplit(".", 1)[-1]
    last_part = _MEANT.get(last_part, last_part)
    by_last_part = [setting for setting in known if setting.rsplit(".", 1)[-1] == last_part]
    close = by_last_part or get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f" Did you mean {close[0]}?" if close else " --help lists every setting."
    return f"There is no setting {name!r} ({where}).{hint}"


def _value_error(message: str) -> str:
    """The parser's message about a value, as one sentence that says what the setting takes."""
    refused = value_refused(message, _hint)
    if refused is None:
        text = " ".join(message.split())
        return text if text.endswith(".") else text + "."
    name, value = refused
    if not value:
        return f"--{name} needs a value: {takes(_hint(name))}."
    instead = _INSTEAD.get((name, value.lower()))
    return f"{name} must be {takes(_hint(name))}, not {value}{f': {instead}' if instead else ''}."


def _hint(name: str) -> Any:
    """Type of a setting; None where there is none of this name."""
    if name not in known_settings():
        return None
    kind: Any = RunConfig
    for part in name.split("."):
        kind = get_type_hints(kind)[part]
    return kind
