"""The time of a recurrent layer's core (linear attention, SSM), counted in weights of matrix products.

The *core* is the layer without its projections. The time of a matrix product is proportional to its rows and weights.
The time of a core is proportional to its rows and the numbers in its state. So
:class:`CoreWeights` says with how many weights a matrix product would take as long as the core. The planner adds these
weights to the weights of a layer's real products (linear.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from distca.plan.recurrence import Recurrence

_FORWARD, _BACKWARD = 39.5, 56.8
"""The number of weights that take as long as one number of the state, in forward and in backward, on an H200.

Per row, a weight takes 2.79 femtoseconds in forward and 5.84 in backward (distca/plan/cost/tables). Per row, a number
of the state takes 110 and 332 femtoseconds: the gated delta rule of fla 0.5.1 takes 1.89 ms and 5.70 ms for 32,768 rows
and 32 states of 128 × 128 numbers. The source is benchmark/benchmark_results_H200.txt of github.com/QwenLM/FlashQLA."""
_BY_CHANNEL, _ADDING = 1.5, 2 / 3
"""Factors on the time of the gated delta rule: for a core whose decay differs by channel, and for a core without the
delta rule. The first is a guess; the second is the ratio of operations. Neither was measured."""


@dataclass(frozen=True)
class CoreWeights:
    """The time of a core per row, as a number of weights whose matrix product takes the same time.

    Attributes:
        forward: weights for the core's forward.
        backward: weights for the core's backward.
    """

    forward: float
    backward: float


NO_CORE = CoreWeights(0.0, 0.0)
"""For layers without a recurrent core."""


def core_weights(what: Recurrence) -> CoreWeights:
    """Returns the time of the core of recurrence ``what``, from the size of its state and its formula."""
    factor = (1.0 if what.delta else _ADDING) * (_BY_CHANNEL if what.decay_by_channel else 1.0)
    size = factor * math.prod(what.state_shape)
    return CoreWeights(_FORWARD * size, _BACKWARD * size)
