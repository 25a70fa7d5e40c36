"""Fields of a JSON file, as tables say them: read, inert, left out with a warning, or served at some values only."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from distca.errors import ModelError

REQUIRED: Final = object()
"""The default of a field that has to be there."""
SERVED: Final = object()
"""The default of a field that has a served value where it is missing."""
OFF: Final[tuple[Any, ...]] = (None, False, 0, "", [], {})
"""Values with which a field asks for nothing."""
_LARGEST = 2**31 - 1
"""Rows and sizes are counted in 32 bits."""
_LONGEST_SHOWN = 60
"""Characters of a value in a message."""

Kind = Literal[
    "count", "index", "indices", "number", "switch", "switches", "numbers", "pattern", "text", "texts", "fields"
]


@dataclass(frozen=True)
class Read:
    """A field that the model's description is made of.

    Attributes:
        kind: type of its values. A count is at least 1, an index at least 0, a number above 0 and finite.
        default: what transformers takes where the field is missing.
        optional: null is a value of it too.
    """

    kind: Kind
    default: Any = REQUIRED
    optional: bool = False


@dataclass(frozen=True)
class Inert:
    """A field that changes nothing of what is trained.

    Attributes:
        why: the reason.
    """

    why: str


@dataclass(frozen=True)
class LeftOut:
    """A field that is not done, without which logits are the same; a warning says so.

    Attributes:
        why: what is different then, as the rest of a sentence.
        unless: values that need no warning.
        default: what transformers takes where the field is missing.
    """

    why: str
    unless: tuple[Any, ...] = OFF
    default: Any = None


@dataclass(frozen=True)
class Only:
    """A field that is served at some values.

    Attributes:
        values: these.
        why: why no other is, as the rest of a sentence.
        default: what transformers takes where the field is missing, if it is none of them.
    """

    values: tuple[Any, ...]
    why: str
    default: Any = SERVED


Field = Read | Inert | LeftOut | Only

_WORDS: dict[Kind, str] = {
    "count": f"a whole number of at least 1 and at most {_LARGEST}",
    "index": f"a whole number of at least 0 and at most {_LARGEST}",
    "indices": "a list of whole numbers of at least 0",
    "number": "a finite number above 0",
    "switch": "true or false",
    "switches": "a list of 0 and 1",
    "numbers": "a list of finite numbers above 0",
    "pattern": "a whole number of at least 0, or a text",
    "text": "a text",
    "texts": "a list of texts",
    "fields": "an object with fields",
}


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and value <= _LARGEST and not isinstance(value, bool)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


_FITS: dict[Kind, Callable[[Any], bool]] = {
    "count": lambda value: _is_whole(value) and value >= 1,
    "index": lambda value: _is_whole(value) and value >= 0,
    "indices": lambda value: isinstance(value, list) and all(_is_whole(each) and each >= 0 for each in value),
    "number": lambda value: is_number(value) and value > 0,
    "switch": lambda value: isinstance(value, bool),
    "switches": lambda value: isinstance(value, list) and all(_is_whole(each) and each in (0, 1) for each in value),
    "numbers": lambda value: isinstance(value, list) and all(is_number(each) and each > 0 for each in value),
    "pattern": lambda value: isinstance(value, str) or (_is_whole(value) and value >= 0),
    "text": lambda value: isinstance(value, str),
    "texts": _is_texts,
    "fields": lambda value: isinstance(value, dict),
}


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that fits a float; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


@dataclass(frozen=True)
class Values:
    """The values of a file's fields.

    Attributes:
        read: the value of every field that is read, by name.
        warnings: sentences on what is left out.
    """

    read: Mapping[str, Any]
    warnings: tuple[str, ...]


def read_fields(
    content: Mapping[str, Any],
    table: Mapping[str, Field],
    where: str,
    owner: str,
    known: Collection[str] = (),
    elsewhere: Mapping[str, Field] | None = None,
) -> Values:
    """Read fields by their table, and refuse what is not known to be served.

    Args:
        content: the fields.
        table: what each one does.
        where: name of the file, for messages.
        owner: whose table it is, with its article, for messages.
        known: names of fields that other models have; they are refused where they ask for something.
        elsewhere: what is to be said of some of them.

    Raises:
        ModelError: a field is missing, of another type, or not served.
    """
    unread = Only(OFF, f"which {owner} of transformers does not have, so it is not known what it asks for")
    others, found, warnings = elsewhere or {}, dict[str, Any](), list[str]()
    strange = sorted(name for name in content if name not in table and name not in others and name not in known)
    for name, value in content.items():
        field = table.get(name) or others.get(name)
        if field is None and name not in strange:
            field = unread
        if isinstance(field, Only) and not _among(value, field.values):
            comma = "" if field is unread else " but"
            raise ModelError(f"{where} has {shown(name, value)},{comma} {field.why}.")
        if isinstance(field, LeftOut) and not _among(value, field.unless):
            warnings.append(f"{where} has {shown(name, value)}, {field.why}.")
    for name, field in table.items():
        if isinstance(field, Read):
            found[name] = _checked(content, name, field, where)
        if isinstance(field, Only) and name not in content and field.default is not SERVED:
            raise ModelError(f"{where} has no {name}, which then is {field.default}, but {field.why}.")
        if isinstance(field, LeftOut) and name not in content and not _among(field.default, field.unless):
            warnings.append(f"{where} has no {name}, which then is {field.default}, {field.why}.")
    if strange:
        does, it = ("does", "it") if len(strange) == 1 else ("do", "them")
        warnings.append(
            f"{where} has {', '.join(strange)}, which no class of transformers reads, and which {does} nothing here; "
            f"an export keeps {it}."
        )
    return Values(found, tuple(warnings))


def shown(name: str, value: Any) -> str:
    """A field and its value as a message has them; true and large values are left out."""
    said = "" if value is True or isinstance(value, dict) else "null" if value is None else repr(value)
    said = said.lower() if value is False else said
    if len(said) > _LONGEST_SHOWN:
        said = said[:_LONGEST_SHOWN] + "…"
    return f"{name} {said}".rstrip()


def _among(value: Any, values: Collection[Any]) -> bool:
    """Whether a value is one of these, where 1 and true are not the same, and a list is as good as a tuple."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)


def _checked(content: Mapping[str, Any], name: str, field: Read, where: str) -> Any:
    value = content.get(name, field.default)
    if value is REQUIRED or (value is None and field.default is REQUIRED and not field.optional):
        raise ModelError(f"{where} has no {name}, without which the model is unknown.")
    if value is None and (field.optional or name not in content):
        return None
    if not _FITS[field.kind](value):
        raise ModelError(f"{where} has {shown(name, value)}; it must be {_WORDS[field.kind]}.")
    return float(value) if field.kind == "number" else value
