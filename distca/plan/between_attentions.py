"""What a rank computes between two attentions, for plans that level it together with attention."""

from __future__ import annotations

from distca.plan.cost.model import LinearRate
from distca.plan.options import NonAttention


def between_attentions(rate: LinearRate, weights: int, recomputed: int, layers: int, tp: int) -> NonAttention:
    """Seconds per row of a rank's matrix products between two attentions.

    A stage of n layers computes its linear layers n − 1 times between two attentions; what comes before the first and
    after the last one leaves nothing to serve. Norms, rotation and activation are not counted, so an idle stage gets
    rather too little than too much.

    Args:
        rate: of matrix products.
        weights: of a whole layer.
        recomputed: those of them that backward multiplies with once more.
        layers: of the stage.
        tp: tensor-parallel ranks, which share the weights.
    """
    each = (layers - 1) / layers / tp
    return NonAttention(each * weights * rate.forward, each * (weights * rate.backward + recomputed * rate.forward))
