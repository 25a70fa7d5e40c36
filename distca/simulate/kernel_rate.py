"""Scales the cost of core attention to a kernel of another speed, by the same factor at all lengths."""

from __future__ import annotations

import numpy as np

from distca.errors import SimulationError
from distca.plan import AttentionShape, CostModel
from distca.plan.cost.scaled import scaled

_LONG = 65_536
"""Tokens of the document by which a kernel's speed is stated."""


def forward_tflops(cost: CostModel) -> float:
    """Returns the TFLOP/s at which a kernel computes the forward of a document of ``_LONG`` tokens on one GPU."""
    shape: AttentionShape = cost.shape
    pairs = _LONG * (_LONG + 1) / 2
    seconds = float(cost.forward(np.array([_LONG]), np.array([_LONG]))[0])
    return 2 * shape.heads * (shape.head_dim + (shape.value_dim or shape.head_dim)) * pairs / seconds / 1e12


def at_rate(cost: CostModel, tflops: float) -> CostModel:
    """Returns the cost with all seconds multiplied so that :func:`forward_tflops` is ``tflops``.

    Raises:
        SimulationError: the rate is not above 0.
    """
    if not tflops > 0:
        raise SimulationError(f"`attention_tflops` is {tflops:g}; it must be above 0.")
    factor = forward_tflops(cost) / tflops
    return scaled(cost, factor, factor)
