"""A linear layer with a bias where Megatron's configuration gives it none."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def with_bias(linear: type) -> type:
    """Returns a class of linear layers like ``linear`` that always have a bias."""

    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        linear.__init__(self, *arguments, **{**named, "bias": True})  # type: ignore[misc]

    return type(f"{linear.__name__}WithBias", (linear,), {"__init__": __init__, "__module__": linear.__module__})
