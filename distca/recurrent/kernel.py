"""The interface of kernels of recurrent cores, which go over rows of a document from a state to the next state.

``plan/recurrence.py`` has the formula. A document may be cut over ranks. A *piece* is a run of its rows on one rank,
and a kernel computes some pieces at a time. A whole piece turns the state S before it into A·S + B, where A is its
*transition* and B its *own state*; both together are its *summary*. Ranks send each other summaries, so that each can
compute the states before its pieces. ``runtime/recurrent_call.py`` calls kernels. Implementations are reference.py and
fla_delta_rule.py.

Shape suffixes: N rows of a rank (padding included), H heads, K elements of a head of q or k, V of one of v; P pieces of
a call. States and their gradients have at least float32. In bfloat16 their error over 128 pieces is 1,000 times as
large.
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
        k: k_NHK, repeated for the heads that share it.
        v: v_NHV.
        g: g_NH, logarithms of the state's decay, 0 or less.
        beta: beta_NH, factors on what each row adds to the state.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def zeros_like(self) -> CoreRows:
        """Zeros in the same shapes."""
        return CoreRows(*(torch.zeros_like(each) for each in self.all))

    def unwritten(self, rows: int) -> CoreRows:
        """New memory in the same shapes; zero from row ``rows`` on, where padding is, and not set before."""
        return CoreRows(*(unwritten_like(each, rows) for each in self.all))

    @property
    def all(self) -> tuple[torch.Tensor, ...]:
        """The five tensors, in this order."""
        return self.q, self.k, self.v, self.g, self.beta

    def at(self, span: Span) -> CoreRows:
        """The rows of a piece."""
        return CoreRows(*(each[slice(*span)] for each in self.all))


class RecurrentKernel(Protocol):
    """Computes one recurrence. Rows outside of the given pieces are neither read nor written."""

    name: str

    def forward(
        self,
        rows: CoreRows,
        spans: Sequence[Span],
        states_PHKV: torch.Tensor | None,
        o_NHV: torch.Tensor,
        wanted: bool = True,
    ) -> torch.Tensor:
        """Computes the outputs of pieces, and the states behind them.

        Args:
            rows: rows of the rank.
            spans: the pieces.
            states_PHKV: the states before the pieces; None for zeros.
            o_NHV: the outputs; rows of the pieces are written.
            wanted: whether the states behind pieces are returned. Those of many short documents take much memory.

        Returns:
            The states behind the pieces [P, H, K, V]; P is 0 unless they are ``wanted``.
        """
        ...

    def summaries(self, rows: CoreRows, spans: Sequence[Span]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the pieces' own states B_PHKV and transitions A [P, *transition_shape]."""
        ...

    def state_gradients(self, rows: CoreRows, spans: Sequence[Span], do_NHV: torch.Tensor) -> torch.Tensor:
        """Returns the part of the gradients of the states before the pieces that comes from the pieces' outputs.

        The other part, from the states behind them, is their gradients times the pieces' transitions."""
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
        """Computes the gradients of the pieces' rows, and of the states before the pieces.

        Args:
            rows: rows of the rank.
            spans: the pieces.
            states_PHKV: the states before the pieces; None for zeros.
            do_NHV: gradients of the outputs.
            dstates_PHKV: gradients of the states behind the pieces; None for zeros.
            gradients: gradients of the rows; those of the pieces are written.
            wanted: whether the gradients of the states before pieces are returned.

        Returns:
            The gradients of the states before the pieces [P, H, K, V]; P is 0 unless they are ``wanted``.
        """
        ...


def unwritten_like(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """New memory in the shape of ``tensor``; zero from row ``rows`` on, where padding is, and not set before."""
    new = torch.empty_like(tensor)
    new[rows:].zero_()
    return new


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states for rows of ``dtype``: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def carried(transition: torch.Tensor, state: torch.Tensor, backward: bool = False) -> torch.Tensor:
    """Applies a transition A: A·S for a state S, or Aᵀ·dS for a gradient dS of a state.

    Args:
        transition: [..., H, K, K] matrices, or [..., H, 1, 1] factors.
        state: [..., H, K, V].
        backward: whether ``state`` is a gradient.
    """
    if transition.shape[-1] == 1:
        return transition * state
    return (transition.mT if backward else transition) @ state
