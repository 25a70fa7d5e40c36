"""The time of a recurrent layer's core (linear attention, SSM), counted in weights of matrix products.

A matrix product's time grows with its rows and its weights. A core's time grows with its rows and the numbers in its
state. So a core takes as long as a product with some number of weights, :class:`CoreWeights`. The planner adds it to
the weights of a layer's real products (linear.py). One ratio, measured on one GPU, then serves GPUs of all speeds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from distca.plan.recurrence import Recurrence

_FORWARD, _BACKWARD = 39.5, 56.8
"""The number of weights whose product takes as long as one number of the state, in forward and in backward.

They are found from an H200. Per row, a weight takes 2.79 femtoseconds in forward and 5.84 in backward
(distca/plan/cost/tables). For 32,768 rows and 32 states of 128 × 128 numbers, the gated delta rule of fla 0.5.1 takes
1.89 ms and 5.70 ms. That is 110 and 332 femtoseconds per row and number of the state. The source is
benchmark/benchmark_results_H200.txt of github.com/QwenLM/FlashQLA."""
_BY_CHANNEL, _ADDING = 1.5, 2 / 3
"""Factors on the time of the gated delta rule, not measured. A core whose decay differs by channel takes 1.5 times as
long, which is a guess. A core without the delta rule takes 2/3, the ratio of their operations."""


@dataclass(frozen=True)
class CoreWeights:
    """The time of a core per row, as a number of weights whose matrix product takes the same time.

    Attributes:
        forward: for the core's forward. Two other passes over a piece of a document are taken to cost as much: the
            summary of the piece, and the gradient of the state before it.
        backward: for the core's backward.
    """

    forward: float
    backward: float


NO_CORE = CoreWeights(0.0, 0.0)
"""For layers without a recurrent core."""


def core_weights(what: Recurrence) -> CoreWeights:
    """The time of a recurrence's core, from the size of its state and the sort of its recurrence."""
    factor = (1.0 if what.delta else _ADDING) * (_BY_CHANNEL if what.decay_by_channel else 1.0)
    size = factor * math.prod(what.state_shape)
    return CoreWeights(_FORWARD * size, _BACKWARD * size)
