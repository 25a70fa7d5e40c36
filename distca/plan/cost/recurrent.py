"""Estimates the time of a recurrent layer's recurrence, for the simulator: as a number of weights.

A matrix product with this number of weights takes as long as the recurrence, for equally many rows. Projections and the
convolution are counted elsewhere. The time per row is taken as proportional to the number of elements of the state.
Example: in forward, a gated delta net whose state has 1,000 elements takes as long as a matrix product with 39,500
weights.

For few heads on a GPU the estimate is too low. With 8 heads of 128 × 128 elements and one document of 32,768 rows,
forward takes 1.9 times the estimate. The measurement is from FlashQLA's benchmark results, which are named below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from distca.plan.recurrence import Recurrence

_FORWARD, _BACKWARD = 39.5, 56.8
"""The number of weights that take as long as one element of the recurrent state, in forward and backward, on an H200.

| femtoseconds per row | forward | backward | source |
|---|---|---|---|
| a weight | 2.79 | 5.84 | distca/plan/cost/tables/h200_flash4_32x8x128.json |
| an element of the state, with the gated delta rule | 110 | 332 | flash-linear-attention 0.5.1: 1.89 ms and 5.70 ms |

The milliseconds are for 32,768 rows and 32 states of 128 × 128 elements, from benchmark/benchmark_results_H200.txt of
github.com/QwenLM/FlashQLA."""
_WITHOUT_DELTA = 2 / 3
"""The factor on the figures above for a recurrence without the delta rule: the ratio of operations. It was not
measured."""


@dataclass(frozen=True)
class CoreWeights:
    """The number of weights of a matrix product that takes as long as the recurrence."""

    forward: float
    backward: float


def core_weights(what: Recurrence) -> CoreWeights:
    size = (1.0 if what.delta else _WITHOUT_DELTA) * math.prod(what.state_shape)
    return CoreWeights(_FORWARD * size, _BACKWARD * size)
