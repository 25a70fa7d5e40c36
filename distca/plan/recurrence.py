"""The formula of recurrent layers (linear attention, SSM), and the sizes that follow from it.

A row is one token. Each head has a *state* S [K, V], which each row reads and changes, one row after the other:

    S ← e^g · S;   u = β · (v − Sᵀk) with the delta rule, β · v without it;   S ← S + k uᵀ;   o = scale · Sᵀq

q, k and v come from a short causal convolution over rows. Each row and head has one β and one g.

A *piece* is a range of a document's rows on one rank. If S is the state before a piece, A·S + B is the state after
it. A (the piece's *transition*) and B (its *own state*) do not depend on S.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Column = Literal["q", "k", "v"]
_STATE_NUMBER_BYTES = 4  # float32


@dataclass(frozen=True)
class Recurrence:
    """The shape and the formula of a recurrent layer, for the heads of one tensor-parallel rank.

    Attributes:
        key_heads: heads of q and of k; ``heads`` / ``key_heads`` heads of v share one head of q and one of k.
        heads: heads of v and of the state.
        key_dim: K, channels of a head of q or k.
        value_dim: V, channels of a head of v.
        normalise: whether heads of q and k are divided by their L2 norm.
        kernel: rows that the convolution reads for one row: the row itself and ``kernel`` - 1 earlier rows.
        columns: the order of q, k and v among the convolution's channels.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    scale: float = 1.0
    delta: bool = True
    normalise: bool = True
    kernel: int = 4
    columns: tuple[Column, Column, Column] = ("q", "k", "v")

    @staticmethod
    def gated_delta_net(key_heads: int, heads: int, key_dim: int, value_dim: int, kernel: int = 4) -> Recurrence:
        """Returns the formula of a gated delta net (arXiv 2412.06464), as in Qwen3-Next and Qwen3.5."""
        return Recurrence(key_heads, heads, key_dim, value_dim, key_dim**-0.5, kernel=kernel)

    @staticmethod
    def mamba2(groups: int, heads: int, state_dim: int, head_dim: int, kernel: int = 4) -> Recurrence:
        """Returns the formula of Mamba-2 (arXiv 2405.21060).

        Mamba-2's C, B and x are q, k and v here. Mamba-2's step size is β, and its step size times its A is g."""
        return Recurrence(
            groups, heads, state_dim, head_dim, delta=False, normalise=False, kernel=kernel, columns=("v", "k", "q")
        )

    def __post_init__(self) -> None:
        assert self.heads % self.key_heads == 0 and self.kernel >= 1

    @property
    def halo_rows(self) -> int:
        """Returns how many earlier rows the convolution reads for one row."""
        return self.kernel - 1

    @property
    def widths(self) -> tuple[int, int, int]:
        """Returns the number of channels of q, k and v, in the order of :attr:`columns`."""
        of_keys, of_values = self.key_heads * self.key_dim, self.heads * self.value_dim
        first, second, third = (of_values if name == "v" else of_keys for name in self.columns)
        return first, second, third

    @property
    def channels(self) -> int:
        return sum(self.widths)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.heads, self.key_dim, self.value_dim

    @property
    def transition_shape(self) -> tuple[int, int, int]:
        """Returns the shape of the transitions of all heads.

        With the delta rule, a head's transition is a matrix. Without it, the transition is a factor on the state."""
        return (self.heads, self.key_dim, self.key_dim) if self.delta else (self.heads, 1, 1)

    @property
    def state_bytes(self) -> int:
        return _STATE_NUMBER_BYTES * math.prod(self.state_shape)

    @property
    def transition_bytes(self) -> int:
        return _STATE_NUMBER_BYTES * math.prod(self.transition_shape)

    @property
    def operations(self) -> int:
        """Returns the floating-point operations of one row in forward.

        Each element of S takes two operations for each of Sᵀk (delta rule only), k uᵀ and Sᵀq. The operations of the
        convolution are added."""
        return (6 if self.delta else 4) * math.prod(self.state_shape) + 2 * self.kernel * self.channels
