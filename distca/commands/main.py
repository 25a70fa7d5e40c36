"""The console script ``distca``: finds the command's function and turns its arguments into options."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import jsonargparse

from distca.commands.parser import CommandParser, Refused, explained, with_options
from distca.errors import DistcaError, OptionError
from distca.log import console, die, setup_logging
from distca.yaml_file import is_null_by_chance

# Command, or group and its commands, and where their functions are.
COMMANDS: dict[str, str | dict[str, str]] = {
    "plan": "distca.commands.plan:plan",
    "data": {
        "convert": "distca.commands.data:convert",
        "describe": "distca.commands.data:describe",
        "preview": "distca.commands.data_preview:preview",
    },
    "checkpoint": {
        "import": "distca.train.checkpoint.command:import_weights",
        "export": "distca.train.checkpoint.command:export_weights",
        "verify": "distca.commands.checkpoint_runs:verify",
        "list": "distca.commands.checkpoint_runs:list_checkpoints",
        "prune": "distca.commands.checkpoint_runs:prune",
    },
    "profile": "distca.commands.profile:profile",
    "simulate": "distca.commands.simulate:simulate",
    "parity": "distca.commands.parity:parity",
    "doctor": "distca.commands.doctor:doctor",
}
GROUP_HELP = {
    "data": "Convert, describe and preview training data.",
    "checkpoint": "Verify, list and delete checkpoints of runs; weights from Hugging Face folders and to them.",
}

_BY_CTRL_C = 130  # as shells say it


def main(argv: list[str] | None = None) -> None:
    """Run one command. A user's mistake ends in one sentence and exit code 2, not in a traceback;
    Ctrl-C in one too."""
    arguments = sys.argv[1:] if argv is None else argv
    setup_logging(rank=0)
    # When it is imported, as --help does, Megatron-Core warns of what is not installed; `distca doctor` says so, too.
    warnings.filterwarnings("ignore", module=r"megatron\.core\.")
    commands: dict[str, Any] = {}
    try:
        commands = components(arguments[0] if arguments else None)
        _check_not_null(arguments)
        jsonargparse.auto_cli(
            commands,
            args=arguments,
            prog="distca",
            description="DistCA: core attention disaggregation for long-context training.",
            parser_class=CommandParser,
        )
    except Refused as refused:
        die(explained(refused, commands, arguments))
    except DistcaError as error:
        die(with_options(str(error), commands, arguments), error.next_step)
    except KeyboardInterrupt:
        console().print("Stopped by Ctrl-C.")
        raise SystemExit(_BY_CTRL_C) from None


def _check_not_null(arguments: Sequence[str]) -> None:
    """OptionError where the text of an option would be taken as if the option was not given."""
    for before, argument in pairwise(["", *arguments]):
        option, _, value = argument.partition("=") if argument.startswith("--") else (before, "", argument)
        if option.startswith("--") and is_null_by_chance(value):
            raise OptionError(f"{option} is {value!r}, which YAML reads as null; choose another text, or write null.")


def components(chosen: str | None) -> dict[str, Any]:
    """The functions behind the commands: all of them for ``--help``, otherwise only those of the chosen command.

    Importing one command's modules only keeps ``distca plan`` from waiting for torch.
    """
    wanted = {chosen: COMMANDS[chosen]} if chosen in COMMANDS else COMMANDS
    found: dict[str, Any] = {}
    for name, place in wanted.items():
        if isinstance(place, dict):
            group = {command: _load(where) for command, where in place.items()}
            present = {command: function for command, function in group.items() if function is not None}
            found[name] = {"_help": GROUP_HELP[name], **present} if present else {}
        else:
            found[name] = _load(place)
    return {name: entry for name, entry in found.items() if entry}


def _load(place: str) -> Callable[..., Any] | None:
    """The function at "module:name"; None where this installation has no such module."""
    module, _, name = place.partition(":")
    if find_spec(module) is None:
        return None
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


if __name__ == "__main__":
    main()
