"""The parser of the ``distca`` command, whose messages are sentences of ours."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, get_type_hints

import jsonargparse

from distca.errors import OptionError
from distca.words import takes, value_refused


class Refused(SystemExit):
    """A command line that cannot be parsed, in the parser's own words; SystemExit, as parsers end with one."""

    def __init__(self, message: str) -> None:
        super().__init__(2)
        self.message = message


class CommandParser(jsonargparse.ArgumentParser):
    """Hands its message on instead of printing usage and message."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise Refused(message) from ex


def explained(refused: Refused, commands: Mapping[str, Any], arguments: Sequence[str]) -> OptionError:
    """The sentence for a command line that was refused.

    Args:
        refused: the parser's words.
        commands: functions by command, or by group and command.
        arguments: the command line.
    """
    words, command = _chosen(commands, arguments)
    name = " ".join(["distca", *words])
    if isinstance(command, Mapping):
        error = OptionError(_group_sentence(name, command, arguments[len(words) :]))
    else:
        error = OptionError(_option_sentence(refused.message, name, command))
    error.next_step = f"{name} --help says more."
    return error


def _chosen(commands: Mapping[str, Any], arguments: Sequence[str]) -> tuple[list[str], Any]:
    """The words of the command line that name a command, and its function, or the group where they end."""
    words: list[str] = []
    place: Any = commands
    for word in arguments:
        if not isinstance(place, Mapping) or word not in place:
            break
        words.append(word)
        place = place[word]
    return words, place


def _group_sentence(name: str, group: Mapping[str, Any], rest: Sequence[str]) -> str:
    choices = ", ".join(command for command in group if not command.startswith("_"))
    if rest and not rest[0].startswith("-"):
        return f"{name} has no command {rest[0]!r}; choose one of {choices}."
    return f"{name} needs a command: one of {choices}."


def _option_sentence(message: str, name: str, function: Callable[..., Any]) -> str:
    hints = get_type_hints(function)
    parameters = inspect.signature(function).parameters

    def option(parameter: str) -> str:
        required = parameters[parameter].default is inspect.Parameter.empty
        word = required and parameters[parameter].kind is not inspect.Parameter.KEYWORD_ONLY
        return parameter if word else f"--{parameter}"

    refused = value_refused(message, hints.get)
    if refused:
        parameter, value = refused
        wanted = takes(hints[parameter])
        return f"{option(parameter)} must be {wanted}, not {value}." if value else f"--{parameter} needs {wanted}."
    missing = re.search(r"arguments are required: (.*)", message)
    if missing:
        wanted_options = [part.rpartition(".")[2].strip(" -") for part in missing[1].split(",")]
        return f"{name} needs {' and '.join(option(part) for part in wanted_options if part in parameters)}."
    unknown = re.search(r"unrecognized arguments: (\S+)", message)
    if unknown:
        close = get_close_matches(unknown[1].lstrip("-").partition("=")[0], parameters, n=1)
        hint = f" Did you mean {option(close[0])}?" if close and unknown[1].startswith("-") else ""
        kind = "option" if unknown[1].startswith("-") else "place for"
        return f"{name} has no {kind} {unknown[1]}.{hint}"
    text = " ".join(message.split())
    return text if text.endswith(".") else text + "."
