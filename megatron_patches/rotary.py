"""Rotary angles by position in the document, computed once per micro-batch, and the rotation of q and k.

megatron's packed path slices its table per document and layer, and reads document borders from the GPU each time. A
document may also start in the middle on this rank. So the angles of all rows are computed from their positions.

Shapes: N rows, F = (H + 2G)·D columns of a QKV projection, H query heads, G key/value heads, D head_dim, E = D/2.
"""

from __future__ import annotations

from dataclasses import dataclass
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
        inv_freq = self._rotary[0].inv_freq.to(positions.device)
        angles = torch.outer(positions.to(inv_freq.dtype), inv_freq)
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


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of the rows of one nano-batch, for all layers.

    Attributes:
        cos_NE: float32.
        sin_NE: float32.
    """

    cos_NE: torch.Tensor
    sin_NE: torch.Tensor

    @staticmethod
    def of(angles: torch.Tensor) -> Rotation:
        """Of [rows, 1, 1, head_dim] angles, whose two halves are the same."""
        half = angles[:, 0, 0, : angles.shape[-1] // 2]
        return Rotation(half.cos(), half.sin())


def split_and_rotate(mixed_NF: torch.Tensor, rotation: Rotation, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a QKV projection as megatron lays it out and rotate q and k by their positions.

    Args:
        mixed_NF: for each group its query heads, its key and its value.
        rotation: of the same rows.
        groups: key/value heads.

    Returns:
        q_NHD and kv_N2GD, differentiable with regard to mixed_NF. On GPUs one kernel reads and writes every number
        once, and computes in float32.
    """
    if mixed_NF.is_cuda and mixed_NF.dtype != torch.float64:
        from megatron_patches.kernels import rotary as kernels

        return kernels.split_and_rotate(mixed_NF, rotation.cos_NE, rotation.sin_NE, groups)
    cos_N1E, sin_N1E = (x.to(mixed_NF.dtype)[:, None] for x in (rotation.cos_NE, rotation.sin_NE))
    heads = mixed_NF.unflatten(1, (groups, -1, 2 * rotation.cos_NE.shape[1]))
    q_NHD, k_NGD, v_NGD = heads[:, :, :-2].flatten(1, 2), heads[:, :, -2], heads[:, :, -1]
    return _rotated(q_NHD, cos_N1E, sin_N1E), torch.stack((_rotated(k_NGD, cos_N1E, sin_N1E), v_NGD), dim=1)


def _rotated(x_NHD: torch.Tensor, cos_N1E: torch.Tensor, sin_N1E: torch.Tensor) -> torch.Tensor:
    first, second = x_NHD.chunk(2, dim=-1)
    return torch.cat((first * cos_N1E - second * sin_N1E, second * cos_N1E + first * sin_N1E), dim=-1)
