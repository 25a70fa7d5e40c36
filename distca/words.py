"""Words for people: counts with their noun, sizes, and what a setting or an option takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

NANO_NAMES = ("ping", "pong")
"""The names of a micro-batch's nano-batches."""


def count(number: int, noun: str) -> str:
    """A number and its noun: "1 step", "2,000 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_bytes(count: float) -> str:
    """Bytes with a binary unit: 1536 → "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def takes(hint: Any) -> str:
    """Returns, in words, the values that a setting of this type takes."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join("null" if part is NoneType else takes(part) for part in get_args(hint))
    if get_origin(hint) is tuple and Ellipsis in get_args(hint):
        return f"a list, each {takes(get_args(hint)[0])}"
    if get_origin(hint) is tuple:
        return f"a list of {len(get_args(hint))} whole numbers"
    if hint == list[int]:
        return "a list of whole numbers"
    if get_origin(hint) is list:
        return f"a list, each {takes(*get_args(hint))}"
    words: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words.get(hint, str(hint))


def rename_parameters(message: str, name_of: Callable[[str], str | None]) -> str:
    """Returns a message of a lower layer with the names that its parameters have here. Lower layers put theirs in
    backquotes.

    Args:
        message: of the lower layer.
        name_of: another name for a parameter, None where it has none here; then it stays in backquotes.
    """
    return re.sub("`([a-z0-9_]+)`", lambda found: name_of(found[1]) or found[0], message)


def value_refused(message: str, hint_of: Callable[[str], Any]) -> tuple[str, str] | None:
    """Takes jsonargparse's message about a value of the wrong type apart.

    Args:
        message: the parser's own words.
        hint_of: type of the setting of a name, None where there is no such setting.

    Returns:
        The setting's name and the value, which is empty where there was none; None for other messages.
    """
    text = " ".join(message.split())
    key = re.search(r'Parser key "([\w.]+)"', text)
    # Of a setting that takes several types the message has one value per type, and last the one that was given.
    value = re.search(r".*(?:Got value|Given value): ?(.*?)\.?$", text)
    if key and value and hint_of(key[1]) is not None:
        return key[1], value[1]
    missing = re.match(r"argument --([\w.]+): expected one argument", text)
    if missing and hint_of(missing[1]) is not None:
        return missing[1], ""
    return None
