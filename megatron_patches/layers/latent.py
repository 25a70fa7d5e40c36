"""A layer with Megatron's multi-head latent attention, cut at its core, and the positions of its rows.

Keys and values of every head are expanded from latent rows at home, and travel to servers in that form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distca.runtime.server import together
from megatron_patches.layers.layer import SplitTransformerLayer, beside
from megatron_patches.patches.position_rotary import PositionRotary
from megatron_patches.steps.batch_context import gather_nano_rows


@dataclass(frozen=True)
class RowAngles:
    """The angles of rows, [rows, 1, 1, qk_pos_emb_head_dim], which are the same in all layers."""

    angles: torch.Tensor

    def of(self, layer_number: int) -> torch.Tensor:
        """The angles of a layer."""
        return self.angles

    def of_nano_batches(self, nano_rows: Sequence[int], chunks: int) -> list[RowAngles]:
        """Returns the angles of each nano-batch; arguments as in :func:`gather_nano_rows`."""
        return [RowAngles(each) for each in gather_nano_rows(self.angles, nano_rows, chunks)]


class LatentRotary(PositionRotary):
    """Stands in for the rotary embedding that a GPTModel with latent attention lacks, and hands layers
    :class:`RowAngles`."""

    def forward(self, *_: Any, **__: Any) -> RowAngles:  # type: ignore[override]
        """Returns the angles of the rows whose positions were set."""
        return RowAngles(super().forward())


class GivenAngles(torch.nn.Module):
    """Stands in for the rotary embedding of Megatron's attention, and returns the angles that were set last.

    Args:
        factor: YaRN's factor on cosines and sines; None for an embedding that returns angles alone.
    """

    def __init__(self, factor: float | None) -> None:
        super().__init__()
        self._factor = factor
        self.angles: torch.Tensor | None = None

    def get_rotary_seq_len(self, *_: Any, **__: Any) -> int:
        """Returns 0: the attention asks for a length before it calls this module, but the angles do not depend on
        it."""
        return 0

    def forward(self, *_: Any, **__: Any) -> Any:
        """Returns the angles, with the factor where there is one, as Megatron's embeddings do."""
        assert self.angles is not None, "no angles were set for these rows"
        return self.angles if self._factor is None else (self.angles, self._factor)


class LatentLayer(SplitTransformerLayer):
    """A layer whose keys and values are expanded from latent rows. The output of the first norm is kept for backward,
    as two projections read it."""

    def pre(self, hidden: torch.Tensor, rotation: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Computes the norm and Megatron's projections, with the angles of these rows.

        Args:
            hidden: [rows, 1, hidden].
            rotation: [rows, 1, 1, qk_pos_emb_head_dim] angles.

        Returns:
            ``hidden`` for :meth:`post`; q_NHD; and [rows, heads, key and value] keys and values.
        """
        attention = self.self_attention
        hidden, normed = beside(self.input_layernorm, hidden)
        attention.rotary_pos_emb.angles = rotation  # set in here, so that recomputation sets them again
        q, k, v, *_ = attention.get_query_key_value_tensors(normed)
        return hidden, q.squeeze(1), together(k.squeeze(1), v.squeeze(1))


def use_row_angles(model: Any) -> None:
    """Makes an attached model's latent attention use positions from :class:`LatentRotary`, with the frequencies and the
    factor of Megatron's own embedding."""
    for layer in model.decoder.layers:
        made = layer.self_attention.rotary_pos_emb(2)
        angles, factor = made if isinstance(made, tuple) else (made, None)
        frequencies = angles[1, 0, 0, : angles.shape[-1] // 2]  # at position 1
        layer.self_attention.rotary_pos_emb = GivenAngles(factor)
    model.rotary_pos_emb = LatentRotary(frequencies)
