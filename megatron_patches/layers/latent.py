"""A transformer layer with multi-head latent attention, cut at core attention, and the angles by which its rows turn.

In latent attention (DeepSeek-V2) a narrow *latent row* holds the keys and values of all heads of a token. Here the rank
that holds the token expands its latent row to the keys and values of every head, before core attention. Other ranks
may compute core attention; they get expanded keys and values.

RoPE's angles depend on each row's position in its document, and are the same in all layers. So the model computes them
once, as :class:`RowAngles`, and each layer gives them to Megatron's attention through :class:`GivenAngles`.
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
    """RoPE's angles of rows, the same in all layers. Other models have ``RowRotations`` (``rotations.py``) instead.

    Attributes:
        angles: [rows, 1, 1, qk_pos_emb_head_dim].
    """

    angles: torch.Tensor

    def of(self, layer_number: int) -> torch.Tensor:
        """Returns the angles of a layer."""
        return self.angles

    def of_nano_batches(self, nano_rows: Sequence[int], chunks: int) -> list[RowAngles]:
        """Returns the angles of each nano-batch. A micro-batch is computed as two nano-batches.

        Args:
            nano_rows: number of rows of each nano-batch.
            chunks: number of tensor-parallel ranks that share the rows; :func:`gather_nano_rows` tells their order.
        """
        return [RowAngles(each) for each in gather_nano_rows(self.angles, nano_rows, chunks)]


class LatentRotary(PositionRotary):
    """The rotary embedding of a GPTModel with latent attention, for which Megatron builds none; it returns
    :class:`RowAngles`."""

    def forward(self, *_: Any, **__: Any) -> RowAngles:  # type: ignore[override]
        """Returns the angles of the rows whose positions were set."""
        return RowAngles(super().forward())


class GivenAngles(torch.nn.Module):
    """Stands in for the rotary embedding inside Megatron's latent attention; it returns the angles that a layer set.

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
    """A layer whose keys and values are expanded from latent rows.

    Two projections read the output of the first norm, so it is kept for backward, where other layers compute it again.
    """

    def pre(self, hidden: torch.Tensor, rotation: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Computes the norm, Megatron's projections and RoPE.

        Args:
            hidden: [rows, 1, hidden].
            rotation: [rows, 1, 1, qk_pos_emb_head_dim] angles of these rows.

        Returns:
            ``hidden`` for :meth:`post`; [rows, heads, width of a key] q; and keys and values in one tensor. It is
            [rows, 2, heads, width] where keys and values have one width, else [rows, heads, both widths].
        """
        attention = self.self_attention
        hidden, normed = beside(self.input_layernorm, hidden)
        attention.rotary_pos_emb.angles = rotation  # where backward computes this again, the angles are set again too
        q, k, v, *_ = attention.get_query_key_value_tensors(normed)
        return hidden, q.squeeze(1), together(k.squeeze(1), v.squeeze(1))


def use_row_angles(model: Any) -> None:
    """Makes a model compute the angles once for all layers; ``CAD.attach`` calls it for models with latent attention.

    Frequencies and YaRN's factor are those of Megatron's own embedding in each layer.
    """
    for layer in model.decoder.layers:
        made = layer.self_attention.rotary_pos_emb(2)  # angles of positions 0 and 1
        angles, factor = made if isinstance(made, tuple) else (made, None)
        frequencies = angles[1, 0, 0, : angles.shape[-1] // 2]  # an angle is position times frequency
        layer.self_attention.rotary_pos_emb = GivenAngles(factor)
    model.rotary_pos_emb = LatentRotary(frequencies)
