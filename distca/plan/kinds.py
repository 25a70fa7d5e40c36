"""Kinds of attention layers: which keys a query sees, and how scores become weights.

Layers of one kind share a plan, because a plan depends on the keys that a query sees. The rank that computes attention
also needs to know how scores become weights. Layers that differ only in other things, such as rotary angles or norms of
queries, are of one kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distca.errors import PlanError


@dataclass(frozen=True)
class AttentionKind:
    """One kind of attention layer.

    A query at position p of its document sees the keys [max(0, p - window + 1), p], or [0, p] without a window. Scores
    are q·k times ``scale``; with a softcap c they are c · tanh(q·k · scale / c) before the softmax.

    Attributes:
        scale: factor on the products of queries and keys.
        window: most keys that a query sees, with its own key; 0 for all keys up to its own position.
        softcap: limit of the scores; 0 for none.
        sink: whether each head has a learned extra score in the softmax, which has no value and so adds nothing to o.

    Raises:
        PlanError: the window or the softcap is negative.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sink: bool = False

    def __post_init__(self) -> None:
        if self.window < 0 or self.softcap < 0:
            raise PlanError(
                f"A kind of attention has window {self.window} and softcap {self.softcap}; each must be 0, for none, "
                "or more."
            )

    @property
    def name(self) -> str:
        """Returns the name in tables and pictures: "full" or its window, then its softcap and sinks."""
        parts = [f"window {self.window:,}" if self.window else "full"]
        parts += [f"softcap {self.softcap:g}"] * bool(self.softcap) + ["sinks"] * self.sink
        return ", ".join(parts)


def usual_scale(head_dim: int) -> float:
    """Returns the usual factor on the products of queries and keys: one over the root of the head's width."""
    return float(head_dim**-0.5)


def windows_of(layer_types: Sequence[str], window: int, layers: int) -> tuple[int, ...]:
    """Returns, for each layer, the number of keys that a query sees; 0 for all keys up to its own position.

    Args:
        layer_types: "full" or "window" for each layer; the list is repeated if there are more layers.
        window: keys that a query sees in layers of type window.
        layers: number of the model's layers.
    """
    return tuple(window * (layer_types[layer % len(layer_types)] == "window") for layer in range(layers))


def numbered(of_layers: Sequence[AttentionKind]) -> tuple[tuple[AttentionKind, ...], tuple[int, ...]]:
    """Returns the different kinds of a model's layers, and for each layer the number of its kind.

    Kinds are numbered from 0: first kinds without a window, then kinds with a window, from the longest to the
    shortest."""
    kinds = tuple(sorted(dict.fromkeys(of_layers), key=lambda kind: (kind.window > 0, -kind.window)))
    return kinds, tuple(kinds.index(kind) for kind in of_layers)


def by_stage(of_layer: Sequence[int], stages: int) -> tuple[tuple[int, ...], ...]:
    """Splits the values of all layers into one tuple for each pipeline stage; stages have equally many layers."""
    each = len(of_layer) // stages
    return tuple(tuple(of_layer[stage * each : (stage + 1) * each]) for stage in range(stages))
