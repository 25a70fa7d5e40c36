"""A rotary embedding that computes RoPE's angles from given positions of rows in their documents.

It replaces Megatron's, which assumes that a rank has every packed document from position 0 on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from distca.errors import SupportError
from distca.models.frequencies import frequencies_by_length, inverse_frequencies
from distca.models.rope import RopeScaling


class PositionRotary(torch.nn.Module):
    """A rotary embedding that returns the angles for the positions last given to :meth:`set_positions`.

    RoPE rotates pairs of a head's elements by an angle: the row's position times the pair's frequency.

    Args:
        inv_freq: [pairs] frequency of each pair of a head.
        interpolation: number by which positions are divided, or None.
        by_length: if given, a function that returns the frequencies [rows, pairs], in place of ``inv_freq``. Its
            argument is the length of each row's document, [rows].
        interleaved: whether the two elements of a pair are neighbours. If not, pair i has elements i and i + pairs.
    """

    def __init__(
        self,
        inv_freq: torch.Tensor,
        interpolation: float | None = None,
        by_length: Callable[[torch.Tensor], torch.Tensor] | None = None,
        *,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        # The frequencies are not a buffer, so they are neither saved in checkpoints nor cast with the model.
        self._inv_freq, self._interpolation, self._by_length = inv_freq, interpolation, by_length
        self._interleaved = interleaved
        self._angles: torch.Tensor | None = None

    @staticmethod
    def of(dims: int, base: float, scaling: RopeScaling, *, interleaved: bool = False) -> PositionRotary:
        """Returns the embedding for the first ``dims`` dimensions of a head.

        Only the frequencies of ``scaling`` are applied, not its factor on cosines and sines."""
        by_length = partial(frequencies_by_length, dims, base, scaling) if scaling.by_length else None
        return PositionRotary(inverse_frequencies(dims, base, scaling), by_length=by_length, interleaved=interleaved)

    @property
    def needs_lengths(self) -> bool:
        return self._by_length is not None

    def set_positions(self, positions: torch.Tensor, lengths: torch.Tensor | None = None) -> None:
        """Computes the angles that the next call returns.

        Args:
            positions: [rows] int64 position of each row in its document.
            lengths: [rows] int64 number of tokens of each row's document; read only if :attr:`needs_lengths`.

        Raises:
            SupportError: ``needs_lengths`` is true, but ``lengths`` is None.
        """
        if self._by_length is not None:
            if lengths is None:
                raise SupportError(
                    "RoPE is scaled by the length of each document, but this batch has no lengths; take batches from "
                    "CAD.plan_ahead or CAD.plan_step after CAD.attach."
                )
            angles = positions[:, None] * self._by_length(lengths)
        else:
            self._inv_freq = self._inv_freq.to(positions.device)
            scaled = positions.to(self._inv_freq.dtype)
            if self._interpolation is not None:
                scaled *= 1 / self._interpolation  # rounds as in Megatron, unlike a division
            angles = torch.outer(scaled, self._inv_freq)
        both = angles.repeat_interleave(2, dim=-1) if self._interleaved else torch.cat((angles, angles), dim=-1)
        self._angles = both[:, None, None, :]

    def get_rotary_seq_len(self, *_: Any, **__: Any) -> int:
        """Returns 0. GPTModel passes the length to :meth:`forward`, which does not need it."""
        return 0

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """Returns [rows, 1, 1, dims] angles, one for each rotated element, as Megatron's RotaryEmbedding does."""
        assert self._angles is not None, "set_positions was not called for this micro-batch"
        return self._angles


def use_position_rotary(model: torch.nn.Module) -> PositionRotary | None:
    """Makes a model's rotary embedding, if any, a :class:`PositionRotary` with equal frequencies; returns it."""
    rotary: Any = getattr(model, "rotary_pos_emb", None)
    if rotary is None:
        return None
    if isinstance(rotary, RotaryEmbedding):  # if Megatron scales RoPE, inv_freq is scaled already
        rotary = PositionRotary(
            rotary.inv_freq, rotary.seq_len_interpolation_factor, interleaved=rotary.rotary_interleaved
        )
        model.rotary_pos_emb = rotary
    assert isinstance(rotary, PositionRotary)
    return rotary
