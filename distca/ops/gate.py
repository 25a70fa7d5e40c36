"""The gates of MLPs that the fused activation (swiglu.py) computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gate:
    """The function g · sigmoid(slope · g) · (u + offset) of a gate g and a gated number u.

    Attributes:
        slope: 1 for SwiGLU.
        offset: 0 for SwiGLU.
        limit: first g is clamped to at most this, and u to between minus this and this; 0 for no limit.
    """

    slope: float = 1.0
    offset: float = 0.0
    limit: float = 0.0


SWIGLU = Gate()
