"""Words for messages: counts with a noun, sizes in bytes, values and types of settings, and names of parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

NANO_NAMES = ("ping", "pong")
"""The names of a micro-batch's nano-batches."""


def count(number: int, noun: str) -> str:
    """Returns a number and its noun, such as "1 step" or "2,000 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_bytes(count: float) -> str:
    """Returns a number of bytes with a binary unit: 1536 is "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def in_words(value: object) -> str:
    """Returns the value of a setting as users write it: None is "null", and "" is "empty"."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value) or "empty"


def not_served(found: Mapping[str, tuple[object, Collection[object]]], beside: str) -> list[str]:
    """Returns a sentence for each setting whose value is none of those that are served beside another setting.

    Args:
        found: for each setting its value, and the values that are served.
        beside: the other setting.
    """
    return [
        f"{setting} is {in_words(value)}, which is not served with {beside}; set it to "
        f"{' or '.join(map(in_words, served))}."
        for setting, (value, served) in found.items()
        if value not in served
    ]


def takes(hint: Any) -> str:
    """Returns in words which values a setting of this type can have, such as "a whole number"."""
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
    """Returns a message in which parameters have other names.

    Errors of inner functions name their parameters, in backquotes. A command shows its own options in their place.

    Args:
        message: the message of an inner function.
        name_of: a function that returns the new name of a parameter, or None. Without a new name the parameter stays as
            it is, in backquotes.
    """
    return re.sub("`([a-z0-9_]+)`", lambda found: name_of(found[1]) or found[0], message)


def value_refused(message: str, hint_of: Callable[[str], Any]) -> tuple[str, str] | None:
    """Returns the setting and the value that jsonargparse refused, from its message; None for other messages.

    Args:
        message: jsonargparse's message.
        hint_of: a function that returns the type of a setting by its name, or None if there is no such setting.

    Returns:
        The setting's name and the refused value. The value is empty if the user gave none.
    """
    text = " ".join(message.split())
    key = re.search(r'Parser key "([\w.]+)"', text)
    # For a setting of several types the message has the value once for each type; the last one is as the user gave it.
    value = re.search(r".*(?:Got value|Given value): ?(.*?)\.?$", text)
    if key and value and hint_of(key[1]) is not None:
        return key[1], value[1]
    missing = re.match(r"argument --([\w.]+): expected one argument", text)
    if missing and hint_of(missing[1]) is not None:
        return missing[1], ""
    return None
