"""The time of a recurrent layer's core, as the number of weights of a matrix product that takes the same time.

So a core is counted together with matrix products, and one measured ratio serves devices of all speeds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from distca.plan.recurrence import Recurrence

_FORWARD, _BACKWARD = 39.5, 56.8
"""The time of a core for each row and number of the state, over the time of a product for each row and weight; forward
and backward. An H200 multiplies a row with a weight in 2.79 and 5.84 femtoseconds (distca/plan/cost/tables). For 32,768
rows and 32 states of 128 × 128, fla 0.5.1's chunked gated delta rule takes 1.89 and 5.70 ms there
(benchmark/benchmark_results_H200.txt of github.com/QwenLM/FlashQLA)."""
_BY_CHANNEL, _ADDING = 1.5, 2 / 3
"""How many times as long other cores take: one with decay by channel, and one without the delta rule. They were not
measured. The first is a guess, the second the ratio of operations."""


@dataclass(frozen=True)
class CoreWeights:
    """The time of a core, as the number of weights of a matrix product that takes the same time.

    Attributes:
        forward: those of the core's forward. A summary takes as long, and so does the gradient of a state alone.
        backward: those of the core's backward.
    """

    forward: float
    backward: float


NO_CORE = CoreWeights(0.0, 0.0)


def core_weights(what: Recurrence) -> CoreWeights:
    """The time of a recurrence's core, as weights of a matrix product."""
    factor = (1.0 if what.delta else _ADDING) * (_BY_CHANNEL if what.decay_by_channel else 1.0)
    size = factor * math.prod(what.state_shape)
    return CoreWeights(_FORWARD * size, _BACKWARD * size)
