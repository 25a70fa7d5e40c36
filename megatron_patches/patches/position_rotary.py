"""Rotary angles by position in the document, computed once per micro-batch.

megatron's own way for packed documents slices a table for each document and layer, and reads document borders from the
GPU each time. On this rank a document may also begin in its middle. So here the angles of all rows are computed from
their positions.
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
    """Stands in for a GPTModel's rotary embedding.

    Args:
        inv_freq: [head_dim / 2] angle per position of every pair of a head.
        interpolation: number that positions are divided by; None leaves them.
        by_length: function from [rows] lengths of the rows' documents to [rows, head_dim / 2] angles per position,
            where these depend on lengths; then ``inv_freq`` is not read.
        interleaved: whether the two numbers of a pair are neighbours, not in the two halves of a head.
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
        # It is no buffer, so that checkpoints keep unmodified megatron's keys, and a cast of the model leaves it alone.
        self._inv_freq, self._interpolation, self._by_length = inv_freq, interpolation, by_length
        self._interleaved = interleaved
        self._angles: torch.Tensor | None = None

    @staticmethod
    def of(dims: int, base: float, scaling: RopeScaling, *, interleaved: bool = False) -> PositionRotary:
        """Returns the embedding for the first ``dims`` dimensions of a head, with any scaling, without its attention
        factor."""
        by_length = partial(frequencies_by_length, dims, base, scaling) if scaling.by_length else None
        return PositionRotary(inverse_frequencies(dims, base, scaling), by_length=by_length, interleaved=interleaved)

    @property
    def needs_lengths(self) -> bool:
        """Whether the angles depend on the documents' lengths."""
        return self._by_length is not None

    def set_positions(self, positions: torch.Tensor, lengths: torch.Tensor | None = None) -> None:
        """Computes the angles of the next forward's rows.

        Args:
            positions: [rows] int64 position in the document of each row.
            lengths: [rows] int64 tokens of each row's document, where :attr:`needs_lengths`.

        Raises:
            SupportError: lengths are needed and not given.
        """
        if self._by_length is not None:
            if lengths is None:
                raise SupportError(
                    "RoPE is scaled by the length of each document, which this batch does not say; take batches from "
                    "CAD.plan_ahead or CAD.plan_step after CAD.attach."
                )
            angles = positions[:, None] * self._by_length(lengths)
        else:
            self._inv_freq = self._inv_freq.to(positions.device)
            scaled = positions.to(self._inv_freq.dtype)
            if self._interpolation is not None:
                scaled *= 1 / self._interpolation  # as megatron rounds it
            angles = torch.outer(scaled, self._inv_freq)
        both = angles.repeat_interleave(2, dim=-1) if self._interleaved else torch.cat((angles, angles), dim=-1)
        self._angles = both[:, None, None, :]

    def get_rotary_seq_len(self, *_: Any, **__: Any) -> int:
        """Returns 0: GPTModel asks for a length before it calls this module, but the angles do not depend on it."""
        return 0

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """Returns [rows, 1, 1, dims] angles, as megatron's RotaryEmbedding does."""
        assert self._angles is not None, "set_positions was not called for this micro-batch"
        return self._angles


def use_position_rotary(model: torch.nn.Module) -> PositionRotary | None:
    """Replaces a model's rotary embedding by a :class:`PositionRotary`, unless it is one; returns it.

    A HybridModel may have none; then it returns None."""
    rotary: Any = getattr(model, "rotary_pos_emb", None)
    if rotary is None:
        return None
    if isinstance(rotary, RotaryEmbedding):  # frequencies are scaled already where megatron scales RoPE
        rotary = PositionRotary(
            rotary.inv_freq, rotary.seq_len_interpolation_factor, interleaved=rotary.rotary_interleaved
        )
        model.rotary_pos_emb = rotary
    assert isinstance(rotary, PositionRotary)
    return rotary
