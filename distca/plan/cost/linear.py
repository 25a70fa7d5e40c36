"""Computes seconds of linear layers, which the planner may balance over ranks together with attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distca.errors import PlanError


@dataclass(frozen=True)
class LinearRate:
    """Seconds of matrix products per token and weight on one GPU.

    Attributes:
        forward, backward: the seconds; backward computes the gradients of input and weight.
        fp8: for each measured FP8 scaling ("current", "delayed" or "blockwise"), the seconds in FP8 divided by the
            seconds in bfloat16.
    """

    forward: float
    backward: float
    fp8: Mapping[str, float] = field(default_factory=dict)

    def in_fp8(self, scaling: str) -> LinearRate | None:
        """Returns the rate with an FP8 scaling, or in bfloat16 for "none"; None if the scaling was not measured."""
        factor = 1.0 if scaling == "none" else self.fp8.get(scaling)
        return None if factor is None else LinearRate(factor * self.forward, factor * self.backward)

    @staticmethod
    def of(content: Mapping[str, Any]) -> LinearRate | None:
        """Returns the rate in the content of a cost table's file; None if the file has no rate.

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
                "The cost table's linear is no object with hidden, ffn, forward_s_per_token and backward_s_per_token "
                "above 0, or its fp8 has a value that is no number above 0; measure it again with `distca profile`."
            ) from None


def layer_weights(hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Returns how many weights a layer has in projections of q, k, v and o, and in its SwiGLU."""
    return hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * ffn


@dataclass(frozen=True)
class NonAttention:
    """Seconds per row (token) of the linear layers between two core attentions.

    Attributes:
        forward, backward: the seconds.
        factors: for each rank that holds rows, a factor on these seconds; empty if all GPUs are equal.
    """

    forward: float
    backward: float
    factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class LayerWork:
    """The matrix products of a layer with core attention.

    Attributes:
        weights: number of weights.
        recomputed: number of weights in those products that backward computes again.
    """

    weights: int
    recomputed: int


def between_attentions(rate: LinearRate, layers: Sequence[LayerWork], tp: int) -> NonAttention:
    """Returns the seconds per row of all products between core attentions, divided by the number of ``layers``.

    So each layer's plan counts an equal share of these products. With a single layer no product lies between two core
    attentions, so the result is 0 seconds. Norms, rotation, activations and recurrent layers do not count.

    Args:
        layers: a pipeline stage's layers with core attention, in order; at least one.
        tp: number of tensor-parallel ranks, which split the weights.
    """
    # Between two core attentions lie the products of one layer: the first layer's after attention, and the second
    # layer's before attention. So n layers have the products of n - 1 layers between attentions.
    forward = sum(rate.forward * each.weights for each in layers[:-1])
    backward = sum(rate.backward * each.weights + rate.forward * each.recomputed for each in layers[:-1])
    shared = len(layers) * tp
    return NonAttention(forward / shared, backward / shared)
