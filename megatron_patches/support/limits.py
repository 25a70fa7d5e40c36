"""The entry of a table of fields or arguments that are supported with some values only, and its check.

The tables are in ``config_fields.py``, ``experts.py`` and ``built_model.py``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from distca.errors import SupportError


@dataclasses.dataclass(frozen=True)
class Limit:
    """The supported values of a field or argument.

    Attributes:
        because: why other values are refused, as the sentence "NAME is VALUE, but ..." goes on.
        served: the values that are supported.
        inert: names of further fields, which are not read while this field has a supported value. So all their values
            are supported.
    """

    because: str
    served: tuple[Any, ...]
    inert: str = ""


def check_limit(name: str, value: Any, limit: Limit) -> None:
    """Refuses a value that ``limit`` does not list; ``name`` is the field's or argument's name.

    Raises:
        SupportError: the value is not supported; the message says why, and which values are.
    """
    if value not in limit.served:
        raise SupportError(f"{name} is {value!r}, but {limit.because}: set it to {_alternatives(limit.served)}.")


def _alternatives(values: tuple[Any, ...]) -> str:
    return " or ".join(repr(value) for value in values)
