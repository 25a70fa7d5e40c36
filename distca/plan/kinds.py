"""Describes the kinds of attention layers: which keys a query sees, and how scores become weights.

A plan says which rank computes the attention of each token. Without pipeline stages, layers of one kind share a plan.
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
        window: the most keys that a query sees, including its own; 0 for all keys up to its own.
        softcap: c; 0 for none.
        sink: whether each head has a *sink*: a learned score in the softmax that belongs to no key.

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
                f"A kind of attention has window {self.window} and softcap {self.softcap}; each must be at least 0, "
                "and 0 stands for none."
            )

    @property
    def name(self) -> str:
        """Returns for example "window 1,024, softcap 50, sinks" or "full"."""
        parts = [f"window {self.window:,}" if self.window else "full"]
        parts += [f"softcap {self.softcap:g}"] * bool(self.softcap) + ["sinks"] * self.sink
        return ", ".join(parts)


def usual_scale(head_dim: int) -> float:
    """Returns the usual factor on the products of queries and keys: 1 / sqrt(``head_dim``)."""
    return float(head_dim**-0.5)


def windows_of(layer_types: Sequence[str], window: int, layers: int) -> tuple[int, ...]:
    """Returns for each layer the number of keys that a query sees; 0 for all keys.

    Args:
        layer_types: "full" or "window" for each layer; the list is repeated if there are more layers.
        window: number of keys that a query sees in a "window" layer.
    """
    return tuple(window * (layer_types[layer % len(layer_types)] == "window") for layer in range(layers))


def numbered(of_layers: Sequence[AttentionKind]) -> tuple[tuple[AttentionKind, ...], tuple[int, ...]]:
    """Returns the different kinds of a model's layers, and for each layer the index of its kind.

    Kinds without a window come first, then kinds with a window, longest window first."""
    kinds = tuple(sorted(dict.fromkeys(of_layers), key=lambda kind: (kind.window > 0, -kind.window)))
    return kinds, tuple(kinds.index(kind) for kind in of_layers)


def by_stage(of_layer: Sequence[int], stages: int) -> tuple[tuple[int, ...], ...]:
    """Returns ``of_layer``, cut into one tuple for each pipeline stage; ``stages`` must divide its length."""
    each = len(of_layer) // stages
    return tuple(tuple(of_layer[stage * each : (stage + 1) * each]) for stage in range(stages))
