"""A transformer layer with multi-head latent attention, and the RoPE of such layers.

In latent attention (DeepSeek-V2) a narrow *latent row* of each token is expanded to the keys and values of all heads.
The rank that holds the token does this. Ranks that compute core attention receive expanded rows.

A model computes RoPE's angles once for all layers, as :class:`RowAngles`. Each layer gives the angles to Megatron's
attention through :class:`GivenAngles`.
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
    """RoPE's angles: [rows, 1, 1, qk_pos_emb_head_dim], in radians."""

    angles: torch.Tensor

    def of(self, layer_number: int) -> torch.Tensor:
        return self.angles

    def of_nano_batches(self, nano_rows: Sequence[int], chunks: int) -> list[RowAngles]:
        """Returns the angles of each *nano-batch*: the whole micro-batch, or each of its two parts.

        Args:
            nano_rows: number of rows of each nano-batch.
            chunks: number of ranks over which sequence parallelism splits the rows; 1 without sequence parallelism.
        """
        return [RowAngles(each) for each in gather_nano_rows(self.angles, nano_rows, chunks)]


class LatentRotary(PositionRotary):
    def forward(self, *_: Any, **__: Any) -> RowAngles:  # type: ignore[override]
        return RowAngles(super().forward())


class GivenAngles(torch.nn.Module):
    """A layer's rotary embedding, which returns the angles that :meth:`LatentLayer.pre` set.

    Args:
        factor: YaRN's factor on cosines and sines; None with plain RoPE.
    """

    def __init__(self, factor: float | None) -> None:
        super().__init__()
        self._factor = factor
        self.angles: torch.Tensor | None = None

    def get_rotary_seq_len(self, *_: Any, **__: Any) -> int:
        """Returns a length for Megatron, which passes it to :meth:`forward`; it has no effect there."""
        return 0

    def forward(self, *_: Any, **__: Any) -> Any:
        """Returns the angles; with YaRN (angles, factor), as Megatron's embedding does."""
        assert self.angles is not None, "no angles were set for these rows"
        return self.angles if self._factor is None else (self.angles, self._factor)


class LatentLayer(SplitTransformerLayer):
    """A layer whose keys and values are expanded from latent rows.

    Other layers may free the output of ``input_layernorm`` until backward. This one does not, because two projections
    read the output.
    """

    def pre(self, hidden: torch.Tensor, rotation: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Computes the norm, Megatron's projections and RoPE.

        Args:
            hidden: [rows, 1, hidden], this tensor-parallel rank's part of the rows.
            rotation: [rows, 1, 1, qk_pos_emb_head_dim] angles of all rows.

        Returns:
            ``hidden`` for :meth:`post`; queries [rows, heads, key width]; keys and values in one tensor, [rows, 2,
            heads, width] if keys and values are equally wide, else [rows, heads, key width + value width].
        """
        attention = self.self_attention
        hidden, normed = beside(self.input_layernorm, hidden)
        attention.rotary_pos_emb.angles = rotation
        q, k, v, *_ = attention.get_query_key_value_tensors(normed)
        return hidden, q.squeeze(1), together(k.squeeze(1), v.squeeze(1))


def use_row_angles(model: Any) -> None:
    """Makes a GPTModel compute the angles once for all layers, from the rotary embeddings that Megatron built."""
    for layer in model.decoder.layers:
        made = layer.self_attention.rotary_pos_emb(2)  # angles of positions 0 and 1
        angles, factor = made if isinstance(made, tuple) else (made, None)
        frequencies = angles[1, 0, 0, : angles.shape[-1] // 2]  # an angle is position times frequency
        layer.self_attention.rotary_pos_emb = GivenAngles(factor)
    model.rotary_pos_emb = LatentRotary(frequencies)
