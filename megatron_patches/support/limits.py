"""Lists supported values of a field of Megatron's configuration or an argument of a model, and refuses other values."""

from __future__ import annotations

import dataclasses
from typing import Any

from distca.errors import SupportError


@dataclasses.dataclass(frozen=True)
class Limit:
    """The supported values of a field or argument.

    Attributes:
        because: why other values are refused, as the rest of a sentence "NAME is VALUE, but ...".
        served: the values that are supported.
        inert: names of other fields, with spaces between them, that no code reads while this field has a supported
            value. So these other fields may have any value.
    """

    because: str
    served: tuple[Any, ...]
    inert: str = ""


def check_limit(name: str, value: Any, limit: Limit) -> None:
    """Refuses an unsupported value of the field or argument ``name``.

    Raises:
        SupportError: the value is not supported.
    """
    if value not in limit.served:
        raise SupportError(f"{name} is {value!r}, but {limit.because}: set it to {_alternatives(limit.served)}.")


def _alternatives(values: tuple[Any, ...]) -> str:
    return " or ".join(repr(value) for value in values)
