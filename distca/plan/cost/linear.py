"""Seconds of linear layers: per token and weight, and of all that a rank computes between two attention layers.

The planner spreads attention over ranks such that all are busy for the same time. For that it may also count the time
in which a *home*, a rank that holds rows, computes the linear layers of its rows: :func:`between_attentions`. The time
of a matrix product grows with its weights and rows, so one measured rate serves all layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distca.errors import PlanError
from distca.plan.cost.recurrent import NO_CORE, CoreWeights


@dataclass(frozen=True)
class LinearRate:
    """Seconds of matrix products per token and weight, measured on the same device as attention.

    Attributes:
        forward: seconds in forward, which has one product with each weight.
        backward: seconds in backward, which has two: for the input's gradient and for the weight's.
        fp8: by scaling ("current", "delayed", "blockwise"), the seconds of a product in FP8, quantising included, over
            those in bfloat16. Scalings that were not measured are missing.
    """

    forward: float
    backward: float
    fp8: Mapping[str, float] = field(default_factory=dict)

    def in_fp8(self, scaling: str) -> LinearRate | None:
        """The rate with a ``scaling`` to FP8; "none" is bfloat16. None if this scaling was not measured."""
        factor = 1.0 if scaling == "none" else self.fp8.get(scaling)
        return None if factor is None else LinearRate(factor * self.forward, factor * self.backward)

    @staticmethod
    def of(content: Mapping[str, Any]) -> LinearRate | None:
        """The rate in the content of a cost table's file; None if it has none.

        Raises:
            PlanError: the rate in the file is not usable.
        """
        found = content.get("linear")
        if found is None:
            return None
        try:
            weights = layer_weights(
                found["hidden"], found["ffn"], content["heads"], content["kv_heads"], content["head_dim"]
            )
            fp8 = {str(scaling): float(factor) for scaling, factor in (found.get("fp8") or {}).items()}
            if not all(0 < factor < math.inf for factor in fp8.values()):
                raise ValueError(fp8)
            forward, backward = (found[f"{side}_s_per_token"] / weights for side in ("forward", "backward"))
            if weights < 1 or not (0 < forward < math.inf and 0 < backward < math.inf):
                raise ValueError(found)
            return LinearRate(forward, backward, fp8)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
            raise PlanError(
                "The cost table's linear is no object with hidden, ffn, forward_s_per_token and backward_s_per_token, "
                "and in fp8 a number above 0 for each scaling; measure it again with `distca profile`."
            ) from None


def layer_weights(hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int, gated: bool = True) -> int:
    """Number of weights of a layer's four matrix products: q,k,v; attention's output; up, and if ``gated`` gate;
    down."""
    return hidden * head_dim * (2 * heads + 2 * kv_heads) + (2 + gated) * hidden * ffn


@dataclass(frozen=True)
class NonAttention:
    """Seconds per row that a rank computes between two attention layers of its pipeline stage.

    Attributes:
        forward: seconds in forward.
        backward: seconds in backward.
        factors: [H] by home rank, its seconds over these; empty if all GPUs are alike.
    """

    forward: float
    backward: float
    factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class LayerWork:
    """The work of a layer without its core attention, as a number of weights that each row is multiplied with.

    Attributes:
        attends: whether the layer has core attention.
        weights: weights of its matrix products.
        recomputed: weights of the products that backward computes once more, because their outputs were not kept.
        core: the work of a recurrent layer's core, as weights; zero for attention layers.
    """

    attends: bool
    weights: int
    recomputed: int
    core: CoreWeights = NO_CORE


def between_attentions(rate: LinearRate, layers: Sequence[LayerWork], tp: int) -> NonAttention:
    """Returns a rank's seconds per row beside core attention, divided by the number of its stage's attention layers.

    A stage with n attention layers has n − 1 stretches between them, with linear layers and whole recurrent layers.
    Their sum is divided by n. Work before the first and after the last attention layer does not count, because no
    attention can be served then. Norms, rotation and activations do not count either. So the planner thinks homes less
    busy than they are, and gives idle stages too little attention rather than too much.

    Args:
        rate: seconds of matrix products.
        layers: the stage's layers, in order; at least one has attention.
        tp: number of tensor-parallel ranks, which share the weights.
    """
    # An attention layer has weights before its core (q,k,v) and after it (the others). A stretch between two cores has
    # the second sort of the first layer and the first sort of the second: as many as one layer. So the last attention
    # layer is left out.
    attending = [number for number, layer in enumerate(layers) if layer.attends]
    between = layers[attending[0] : attending[-1]]
    forward = sum(rate.forward * (each.weights + each.core.forward) for each in between)
    backward = sum(
        rate.backward * (each.weights + each.core.backward) + rate.forward * each.recomputed for each in between
    )
    shared = len(attending) * tp
    return NonAttention(forward / shared, backward / shared)
