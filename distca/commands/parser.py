"""The parser of the ``distca`` command, whose messages are sentences of ours."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, get_type_hints

import jsonargparse

from distca.errors import OptionError
from distca.words import rename_parameters, takes, value_refused


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


def with_options(message: str, commands: Mapping[str, Any], arguments: Sequence[str]) -> str:
    """Returns a command's message with parameters in backquotes replaced by options as they are typed.

    Args:
        message: a sentence.
        commands: functions by command, or by group and command.
        arguments: the command line.
    """
    _, command = _chosen(commands, arguments)
    if isinstance(command, Mapping):
        return message
    parameters = inspect.signature(command).parameters
    return rename_parameters(message, lambda name: _typed(parameters[name]) if name in parameters else None)


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
    hints, parameters = get_type_hints(function), inspect.signature(function).parameters
    refused = value_refused(message, hints.get)
    if refused:
        parameter, value = refused
        wanted, typed = takes(hints[parameter]), _typed(parameters[parameter])
        return f"{typed} must be {wanted}, not {value}." if value else f"--{parameter} needs {wanted}."
    missing = re.search(r"arguments are required: (.*)", message)
    if missing:
        named = [part.rpartition(".")[2].strip(" -") for part in missing[1].split(",")]
        return f"{name} needs {' and '.join(_typed(parameters[part]) for part in named if part in parameters)}."
    unknown = re.search(r"unrecognized arguments: ?(\S*)", message)
    if unknown:
        word = unknown[1] or "''"
        option = word.startswith("-")
        meant = ""
        if option:
            close = get_close_matches(word.lstrip("-").partition("=")[0], parameters, n=1)
            meant = _typed(parameters[close[0]]) if close else ""
        elif unknown[1] and "path" in parameters and (path := _typed(parameters["path"])).startswith("-"):
            meant = f"{path} {word}"
        hint = f" Did you mean {meant}?" if meant else ""
        return f"{name} has no {'option' if option else 'place for'} {word}.{hint}"
    text = " ".join(message.split())
    return text if text.endswith(".") else text + "."


def _typed(parameter: inspect.Parameter) -> str:
    """A parameter as it is typed: a word in its place, or an option."""
    word = parameter.default is inspect.Parameter.empty and parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    return parameter.name if word else f"--{parameter.name}"
