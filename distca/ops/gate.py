"""The gates of MLPs that are computed in one pass."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gate:
    """The function of a gate g and of the number u that it lets through: g · sigmoid(slope · g) · (u + offset).

    Attributes:
        slope: 1 for SwiGLU.
        offset: 0 for SwiGLU.
        limit: most of g, and of u both ways; 0 for none.
    """

    slope: float = 1.0
    offset: float = 0.0
    limit: float = 0.0


SWIGLU = Gate()
