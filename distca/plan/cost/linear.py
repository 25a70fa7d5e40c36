"""Seconds of linear layers: matrix products per token, and those that a rank computes between two attentions."""

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
        forward: one product with each weight.
        backward: two.
        fp8: by how tensors are scaled to FP8 ("current", "delayed", "blockwise"), where that was measured: time of the
            products in FP8, with all that quantises for them, over that in bfloat16.
    """

    forward: float
    backward: float
    fp8: Mapping[str, float] = field(default_factory=dict)

    def in_fp8(self, scaling: str) -> LinearRate | None:
        """The rate where tensors are scaled so to FP8; as it is for "none". None where nobody measured that."""
        factor = 1.0 if scaling == "none" else self.fp8.get(scaling)
        return None if factor is None else LinearRate(factor * self.forward, factor * self.backward)

    @staticmethod
    def of(content: Mapping[str, Any]) -> LinearRate | None:
        """The rate in a table file's content; None where it has none.

        Raises:
            PlanError: it is there, but not usable.
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
    """Seconds per row of what a busy rank computes between two attentions of its stage.

    Attributes:
        forward: in a forward phase.
        backward: in a backward phase.
        factors: [H] how many times as long every home rank takes; none where all are alike.
    """

    forward: float
    backward: float
    factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class LayerWork:
    """The weights that a layer multiplies a row with beside core attention.

    Attributes:
        attends: whether it has core attention.
        weights: of its matrix products.
        recomputed: those of them that backward multiplies with once more.
        core: of a recurrent layer's core; none of attention.
    """

    attends: bool
    weights: int
    recomputed: int
    core: CoreWeights = NO_CORE


def between_attentions(rate: LinearRate, layers: Sequence[LayerWork], tp: int) -> NonAttention:
    """Seconds per row of what a rank computes between two attentions, in the mean over a stage's attentions.

    A stage of n layers with attention computes linear layers n − 1 times between two attentions, and all recurrent
    layers that lie there. What comes before the first and after the last one leaves nothing to serve. Norms, rotation
    and activation are not counted, so an idle stage gets rather too little than too much.

    Args:
        rate: of matrix products.
        layers: of the stage, some with attention.
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
