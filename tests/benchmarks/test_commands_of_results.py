"""Commands in kept results can be typed today: their modules are there and take their options, and settings are known.

Nothing runs. A benchmark's ``main`` is called until it has parsed its arguments. Results whose commands are gone are
those that results/README.md names.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import shlex
import sys
import warnings
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any

import jsonargparse
import pytest

from benchmarks.tables import RESULTS, ROOT
from distca.commands.main import components
from distca.commands.parser import CommandParser, Refused
from distca.errors import ConfigError
from distca.train.config.cli import parse_run_config

PAGES = (ROOT, ROOT / "docs", ROOT / "benchmarks", RESULTS)
ASSIGNMENT = re.compile(r"[A-Z_]+=\S*$")
MODULE = re.compile(r"(?:benchmarks|tests)[./][\w./]+$")
GONE = re.compile(r"Files whose command is no longer there[^:]*: ([^.]*)\.")


class Parsed(Exception):
    """Ends a program that has parsed its arguments."""


def commands_in(content: Any) -> Iterator[str]:
    """Every command of a result, at any depth."""
    for key, each in content.items() if isinstance(content, dict) else enumerate(content):
        if key == "command":
            yield each
        elif isinstance(each, dict | list):
            yield from commands_in(each)


COMMANDS = {
    path.name: list(dict.fromkeys(commands_in(json.loads(path.read_text(encoding="utf-8")))))
    for path in sorted(RESULTS.glob("*.json"))
}


def wrong_with(command: str, patch: pytest.MonkeyPatch) -> str:
    """What keeps a command from running today, or "". What follows a comma or a semicolon is a remark."""
    if "python -c " in command:
        return wrong_with_python(shlex.split(command.partition("python -c ")[2])[0])
    words = [word for word in shlex.split(command) if not ASSIGNMENT.match(word) and word != "..."]
    last = next((number for number, word in enumerate(words) if word.endswith((",", ";"))), len(words))
    words = [word.rstrip(",;") for word in words[: last + 1]]
    if words[0] == "distca":
        return wrong_with_distca(words[1:])
    named = [number for number, word in enumerate(words[:4]) if MODULE.match(word)]
    if not named:
        return f"what {words[0]} runs is not known"
    if words[0] in ("pytest", "bash"):
        return "" if (ROOT / words[named[0]]).exists() else f"there is no {words[named[0]]}"
    return wrong_with_module(words[named[0]], words[named[0] + 1 :], patch)


def wrong_with_python(text: str) -> str:
    """What a line of Python imports that is not there."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(("distca", "tests", "benchmarks")):
            module = importlib.import_module(str(node.module))
            if missing := [name.name for name in node.names if not hasattr(module, name.name)]:
                return f"there is no {missing[0]}"
    return ""


def wrong_with_distca(arguments: list[str]) -> str:
    commands = components(arguments[0])
    parser = jsonargparse.capture_parser(
        lambda: jsonargparse.auto_cli(commands, args=arguments, parser_class=CommandParser)
    )
    try:
        parser.parse_args(arguments)
    except Refused as refused:
        return refused.message
    return ""


def wrong_with_module(name: str, arguments: list[str], patch: pytest.MonkeyPatch) -> str:
    if name.endswith(".py"):
        patch.syspath_prepend(ROOT / "benchmarks")  # as Python does for a script
    name = name.removesuffix(".py").replace("/", ".")
    own, settings = arguments, None
    if "--" in arguments:
        own, settings = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    try:
        module = importlib.import_module(name)
        if hasattr(module, "__path__"):
            module = importlib.import_module(f"{name}.__main__")
    except ModuleNotFoundError as error:
        return str(error)
    patch.setattr(module, "setup_logging", lambda *_, **__: None, raising=False)
    patch.setattr(sys, "argv", [name, *own, *(["--", *settings] if settings is not None else [])])
    patch.chdir(ROOT)
    try:
        with warnings.catch_warnings():
            module.main()
    except Parsed:
        pass
    except SystemExit:
        return "its options are refused"
    try:
        parse_run_config(settings or [])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch, all_cores: None) -> pytest.MonkeyPatch:
    """Programs end when they have parsed their arguments."""
    parse = argparse.ArgumentParser.parse_args

    def parsed(self: argparse.ArgumentParser, *given: Any, **named: Any) -> argparse.Namespace:
        parse(self, *given, **named)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    return monkeypatch


def test_commands_that_are_gone_are_those_that_the_page_names(patch: pytest.MonkeyPatch) -> None:
    wrong = {
        name.removesuffix(".json"): said
        for name, commands in COMMANDS.items()
        for said in (wrong_with(command, patch) for command in commands)
        if said
    }
    found = GONE.search((RESULTS / "README.md").read_text(encoding="utf-8"))
    assert found is not None
    named = re.findall("`([^`]+)`", found[1])
    assert {name: said for name, said in wrong.items() if not any(fnmatch(name, each) for each in named)} == {}
    assert [each for each in named if not any(fnmatch(name, each) for name in wrong)] == []
    assert sum(map(len, COMMANDS.values())) - len(wrong) > 120


def test_every_result_has_a_command_and_a_page() -> None:
    """But for a trace of another result's run."""
    assert [name for name, commands in COMMANDS.items() if not commands] == ["overlap_timeline.json"]
    pages = "".join(path.read_text(encoding="utf-8") for folder in PAGES for path in folder.glob("*.md"))
    assert [name for name in COMMANDS if name not in pages] == []


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("A=1 python -m benchmarks.calibration --output b.json --no-fit", ""),
        ("python -m benchmarks.calibration --output b.json --fit", "options"),
        ("torchrun ... -m benchmarks.throughput --output b -- --train.recompute no", "recompute"),
        ("python benchmarks/none.py", "none"),
        ("pytest tests/gpu/none.py", "none"),
        ("distca parity --experts maybe", "experts"),
        ("python -c 'from distca.plan import none'", "none"),
    ],
)
def test_mistakes_are_found(command: str, said: str, patch: pytest.MonkeyPatch) -> None:
    found = wrong_with(command, patch)
    assert said in found and bool(said) == bool(found)
