"""Seconds of linear layers: per token and weight, and of all that a rank computes between two attention layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distca.errors import PlanError
from distca.plan.cost.recurrent import NO_CORE, CoreWeights


@dataclass(frozen=True)
class LinearRate:
    """Seconds of a layer's matrix products per token and weight, measured on the same device as attention.

    Attributes:
        forward: seconds of the one product with a weight.
        backward: seconds of the two products.
        fp8: by scaling ("current", "delayed", "blockwise"), the time of products in FP8 over that in bfloat16, with the
            time of quantising. It has those that were measured.
    """

    forward: float
    backward: float
    fp8: Mapping[str, float] = field(default_factory=dict)

    def in_fp8(self, scaling: str) -> LinearRate | None:
        """The rate with a ``scaling`` to FP8; "none" is bfloat16. None where this scaling was not measured."""
        factor = 1.0 if scaling == "none" else self.fp8.get(scaling)
        return None if factor is None else LinearRate(factor * self.forward, factor * self.backward)

    @staticmethod
    def of(content: Mapping[str, Any]) -> LinearRate | None:
        """The rate in a table file's content; None where it has none.

        Raises:
            PlanError: the file has a rate that is not usable.
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
    """Weights of a layer's four matrix products: q,k,v; output; gate, if ``gated``, and up; down."""
    return hidden * head_dim * (2 * heads + 2 * kv_heads) + (2 + gated) * hidden * ffn


@dataclass(frozen=True)
class NonAttention:
    """Seconds per row that a rank with a micro-batch computes between two attention layers of its stage.

    Attributes:
        forward: seconds in a forward phase.
        backward: seconds in a backward phase.
        factors: [H] how many times as long each home rank takes; empty where all are alike.
    """

    forward: float
    backward: float
    factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class LayerWork:
    """The work of a layer beside core attention, counted in weights that a row is multiplied with.

    Attributes:
        attends: whether the layer has core attention.
        weights: weights of its matrix products.
        recomputed: weights that backward multiplies with once more, to recompute forward.
        core: the work of a recurrent layer's core; none for attention layers.
    """

    attends: bool
    weights: int
    recomputed: int
    core: CoreWeights = NO_CORE


def between_attentions(rate: LinearRate, layers: Sequence[LayerWork], tp: int) -> NonAttention:
    """Seconds per row that a rank computes between two attention layers, in the mean over the stage's attention layers.

    A stage with n attention layers computes linear layers n − 1 times between two of them, and all recurrent layers
    that lie there. Work before the first and after the last one is not counted, as no attention is left to serve then.
    Nor are norms, rotation and activation. So an idle stage gets too little attention rather than too much.

    Args:
        rate: seconds of matrix products.
        layers: the stage's layers; some have attention.
        tp: tensor-parallel ranks, which share the weights.
    """
    attending = [number for number, layer in enumerate(layers) if layer.attends]
    between = layers[attending[0] : attending[-1]]
    forward = sum(rate.forward * (each.weights + each.core.forward) for each in between)
    backward = sum(
        rate.backward * (each.weights + each.core.backward) + rate.forward * each.recomputed for each in between
    )
    shared = len(attending) * tp
    return NonAttention(forward / shared, backward / shared)
