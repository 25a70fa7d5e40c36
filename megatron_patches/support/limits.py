"""A field or argument that is served for some values only, and the sentence about others."""

from __future__ import annotations

import dataclasses
from typing import Any

from distca.errors import SupportError


@dataclasses.dataclass(frozen=True)
class Limit:
    """A field or argument that is served for some values only.

    Attributes:
        because: the reason why other values are refused, as the end of a sentence: "is ..., but ...".
        served: the values that are served; the first one is proposed.
        inert: names of fields that are not read while this one has a served value.
    """

    because: str
    served: tuple[Any, ...]
    inert: str = ""


def check_limit(name: str, value: Any, limit: Limit) -> None:
    if value not in limit.served:
        raise SupportError(f"{name} is {value!r}, but {limit.because}: set it to {_alternatives(limit.served)}.")


def _alternatives(values: tuple[Any, ...]) -> str:
    return " or ".join(repr(value) for value in values)
