"""Rotary angles by position in the document, computed once per micro-batch.

megatron's packed path slices its table per document and layer, and reads document borders from the GPU each time. A
document may also start in the middle on this rank. So the angles of all rows are computed from their positions.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding


class PositionRotary(torch.nn.Module):
    """Stands in for a GPTModel's rotary embedding.

    Args:
        rotary: the embedding that it replaces.
    """

    def __init__(self, rotary: RotaryEmbedding) -> None:
        super().__init__()
        # In a list, so that it is no submodule and checkpoints keep stock megatron's keys.
        self._rotary = [rotary]
        self._angles: torch.Tensor | None = None

    def set_positions(self, positions: torch.Tensor) -> None:
        """Compute the angles of the next forward's rows.

        Args:
            positions: [rows] int64 position in the document of each row.
        """
        rotary = self._rotary[0]
        inv_freq = rotary.inv_freq.to(positions.device)  # scaled already where the model scales RoPE
        scaled = positions.to(inv_freq.dtype)
        if rotary.seq_len_interpolation_factor is not None:
            scaled *= 1 / rotary.seq_len_interpolation_factor  # as megatron rounds it
        angles = torch.outer(scaled, inv_freq)
        self._angles = torch.cat((angles, angles), dim=-1)[:, None, None, :]

    def get_rotary_seq_len(self, *_: Any, **__: Any) -> int:
        """Asked by GPTModel before it calls this module; the angles do not depend on it."""
        return 0

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """[rows, 1, 1, head_dim] angles, as megatron's RotaryEmbedding returns them."""
        assert self._angles is not None, "set_positions was not called for this micro-batch"
        return self._angles


def use_position_rotary(model: torch.nn.Module) -> PositionRotary:
    """Replace a GPTModel's rotary embedding."""
    rotary = PositionRotary(model.rotary_pos_emb)  # type: ignore[arg-type]
    model.rotary_pos_emb = rotary
    return rotary
