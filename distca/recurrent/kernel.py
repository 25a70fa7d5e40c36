"""The interface of kernels of recurrent cores: they take pieces of documents, each from a state to a state.

Shape suffixes: N rows of the home rank (padding included), H heads, K elements of a head of q or k, V of one of v; P
pieces that are asked for. States and their gradients are float32 at least: bfloat16 ones lose 1,000 times as much over
128 pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Span = tuple[int, int]
"""The first row of a piece and one past its last."""


@dataclass(frozen=True)
class CoreRows:
    """The rows that a core computes with, or their gradients.

    Attributes:
        q: q_NHK, repeated for the heads that share it.
        k: k_NHK.
        v: v_NHV.
        g: g_NH, or g_NHK; not above 0.
        beta: beta_NH.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def zeros_like(self) -> CoreRows:
        """Zeros in the same shapes."""
        return CoreRows(*(torch.zeros_like(each) for each in self.all))

    @property
    def all(self) -> tuple[torch.Tensor, ...]:
        """All five."""
        return self.q, self.k, self.v, self.g, self.beta

    def at(self, span: Span) -> CoreRows:
        """The rows of a piece."""
        return CoreRows(*(each[slice(*span)] for each in self.all))


class RecurrentKernel(Protocol):
    """Computes one recurrence. Rows outside the pieces that are asked for are neither read nor written."""

    name: str

    def forward(
        self,
        rows: CoreRows,
        spans: Sequence[Span],
        states_PHKV: torch.Tensor | None,
        o_NHV: torch.Tensor,
        wanted: bool = True,
    ) -> torch.Tensor:
        """Fill ``o_NHV`` for the pieces, and return the states behind them, or no state unless ``wanted``: those of
        many short documents are large. ``states_PHKV``: the states before the pieces, None for zeros."""
        ...

    def summaries(self, rows: CoreRows, spans: Sequence[Span]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return B_PHKV and the transitions A [P, *transition_shape]: the state behind a piece is A·S + B."""
        ...

    def state_gradients(self, rows: CoreRows, spans: Sequence[Span], do_NHV: torch.Tensor) -> torch.Tensor:
        """Return the gradients of the states before the pieces, for outputs alone."""
        ...

    def backward(
        self,
        rows: CoreRows,
        spans: Sequence[Span],
        states_PHKV: torch.Tensor | None,
        do_NHV: torch.Tensor,
        dstates_PHKV: torch.Tensor | None,
        gradients: CoreRows,
        wanted: bool = True,
    ) -> torch.Tensor:
        """Fill ``gradients`` for the pieces, and return those of the states before them, or none unless ``wanted``.
        ``states_PHKV``: the states before them, ``dstates_PHKV``: gradients of the states behind them; None for
        zeros."""
        ...


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states of rows of ``dtype``: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def carried(transition: torch.Tensor, state: torch.Tensor, backward: bool = False) -> torch.Tensor:
    """A·S for [..., H, K, V] states, or Aᵀ·dS for their gradients.

    Args:
        transition: [..., H, K, K], or [..., H, K or 1, 1] of a diagonal.
        state: [..., H, K, V].
        backward: whether ``state`` is a gradient.
    """
    if transition.shape[-1] == 1:
        return transition * state
    return (transition.mT if backward else transition) @ state
